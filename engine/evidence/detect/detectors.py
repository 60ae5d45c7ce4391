"""The table of all detectors, and the functions that run them."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.evidence.detect import answers, groups, learning, scoring, setbacks
from engine.evidence.detect.findings import Finding, ranked
from engine.evidence.detect.views import Facts, View
from engine.records.settings import ALGORITHMS, ROW_ALGORITHMS

# Kinds of run, as values of `Detector.algorithms`.
_TRAINERS = ALGORITHMS
_ALL = (*ALGORITHMS, "evaluate")
_VIEW_ATTRIBUTES = frozenset(View.__dataclass_fields__)


@dataclass(frozen=True)
class Detector:
    """One way a run goes wrong.

    Attributes:
        id: of the finding it returns.
        find: returns the finding, or None.
        algorithms: the kinds of run it can judge.
        reads: names of metrics or of attributes of `View`, "rescored" or "kept"; it can judge a run
            that has at least one of them. () where it needs none.
        live: whether it also runs while training goes on.
    """

    id: str
    find: Callable[[Facts], Finding | None]
    algorithms: tuple[str, ...] = ("grpo",)
    reads: tuple[str, ...] = ()
    live: bool = True

    def could_judge(self, facts: Facts) -> bool:
        """Whether the run left at least one of the things that this detector reads.

        True for a detector that needs none.
        """
        return not self.reads or any(_was_recorded(name, facts) for name in self.reads)


def _was_recorded(name: str, facts: Facts) -> bool:
    """Whether the run left what a detector reads under this name.

    A name is "rescored" (answers scored again), "kept" (skills measured before and after), that of
    a figure of a view, or that of a metric.
    """
    if name == "rescored" and facts.rescoring.get("scored"):
        return True
    if name == "kept" and facts.kept_skills is not None:
        return True
    if name in _VIEW_ATTRIBUTES and facts.view_values(name):
        return True
    return bool(facts.curve(name))  # a metric of that name


DETECTORS = (
    Detector("uniform_groups", groups.uniform_groups, reads=("groups_effective",)),
    Detector("too_hard", groups.too_hard, reads=("groups_effective",)),
    Detector("too_easy", groups.too_easy, reads=("groups_effective",)),
    Detector(
        "below_start",
        setbacks.below_start,
        _TRAINERS,
        ("heldout_success", "heldout_reward", "heldout_loss"),
    ),
    Detector("length_grew", answers.length_grew, reads=("truncated_share", "cut_share")),
    Detector("truncation", answers.truncation, _ALL, ("truncated_share", "cut_share", "loss")),
    Detector("overthinking", answers.overthinking, ("grpo", "evaluate"), ("think_size",)),
    Detector("repetition", answers.repetition, ("grpo", "evaluate"), ("repeated_share",)),
    Detector("unparsed", answers.unparsed, _ALL, ("form_score", "wrapped_reward")),
    Detector("entropy_collapse", groups.entropy_collapse, reads=("entropy",)),
    Detector("judge_pleasing", scoring.judge_pleasing, ("grpo", "evaluate"), ("judge_gap",)),
    Detector("reward_hacking", scoring.reward_hacking, reads=("reward_mean",)),
    Detector("overfitting", learning.overfitting, ROW_ALGORITHMS, ("heldout_loss",)),
    Detector("too_short", learning.too_short, ("sft",), ("heldout_loss",), live=False),
    Detector("forgetting", setbacks.forgetting, _TRAINERS, ("kept",), live=False),
    Detector("no_update", learning.no_update, _TRAINERS, ("lr",)),
    Detector("unstable", learning.unstable, _TRAINERS, ("grad_norm",)),
    Detector("reward_errors", scoring.reward_errors, _ALL, ("reward_errors", "error_share")),
    Detector("scorer_moves", scoring.scorer_moves, _ALL, ("rescored",), live=False),
    Detector("slow_reward", scoring.slow_reward, reads=("reward_s",)),
    Detector("underpowered", learning.underpowered, _ALL, live=False),
    Detector("infra", learning.infra, _ALL, live=False),
)

IDS = tuple(detector.id for detector in DETECTORS)


def find_all(facts: Facts, *, live: bool = False) -> list[Finding]:
    """Every finding on a run, causes before effects.

    With `live` only those detectors are run that also run while training goes on.
    """
    findings = []
    for detector in DETECTORS:
        if facts.algorithm not in detector.algorithms or (live and not detector.live):
            continue
        finding = detector.find(facts)
        if finding is not None:
            findings.append(finding)
    return ranked(findings)


def not_judged(facts: Facts) -> list[str]:
    """Ids of the detectors for this kind of run that had nothing to read."""
    return [
        detector.id
        for detector in DETECTORS
        if facts.algorithm in detector.algorithms and not detector.could_judge(facts)
    ]
