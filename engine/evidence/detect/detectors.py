"""The table of all detectors, and the functions that run them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from engine.evidence.detect import answers, groups, learning, scoring, setbacks
from engine.evidence.detect.findings import Finding, ranked
from engine.evidence.detect.views import Facts, StartComparison, View
from engine.evidence.stats import thresholds as limits
from engine.records.settings import ALGORITHMS, ROW_ALGORITHMS

# Kinds of run, as values of `Detector.algorithms`.
_TRAINERS = ALGORITHMS
_ALL = (*ALGORITHMS, "evaluate")
# Findings on the course of a run: they are dropped if its end shows that they did no harm.
_ABOUT_THE_COURSE = frozenset({"unstable", "reward_falls"})
_FALLS = frozenset({"below_start", "reward_falls"})
# Effects of a broken policy, which are no faults of their own.
_EFFECTS_OF_BROKEN_POLICY = frozenset(
    {
        "uniform_groups",
        "too_hard",
        "length_grew",
        "repetition",
        "unparsed",
        "entropy_collapse",
        "underpowered",
    }
)
# Each of these may be the cause of a held-out result below the start.
_CAUSES_OF_A_FALL = frozenset(
    {
        "unstable",
        "judge_pleasing",
        "reward_hacking",
        "overfitting",
        "below_start",
        "length_grew",
        "truncation",
    }
)
# Possible causes if a run learnt nothing of its task. Such a run must mend these first; lost skills
# matter only once there is a gain to weigh them against.
_CAUSES_OF_NOT_LEARNING = frozenset(
    {
        "reward_errors",
        "scorer_moves",
        "contradictory_rows",
        "duplicates",
        "pairs_alike",
        "other_exam",
        "rows_disagree",
        "plateau",
        "unstable",
        "no_update",
        "judge_pleasing",
        "reward_hacking",
        "truncation",
        "overthinking",
        "unparsed",
        "uniform_groups",
        "too_hard",
        "too_short",
        "memorised_rows",
    }
)
_VIEW_ATTRIBUTES = frozenset(View.__dataclass_fields__)


@dataclass(frozen=True)
class Detector:
    """One way in which a run goes wrong.

    Attributes:
        id: of the finding that it returns.
        find: returns the finding, or None.
        algorithms: the kinds of run that it can judge.
        reads: names of metrics or of attributes of `View`, "rescored" or "kept"; the detector can
            judge a run that has at least one of them. () if it needs none.
        live: whether it also runs while training is under way.
    """

    id: str
    find: Callable[[Facts], Finding | None]
    algorithms: tuple[str, ...] = ("grpo",)
    reads: tuple[str, ...] = ()
    live: bool = True

    def could_judge(self, facts: Facts) -> bool:
        """Whether the run left at least one of the things that this detector reads. True if it
        reads none."""
        return not self.reads or any(_was_recorded(name, facts) for name in self.reads)


def _was_recorded(name: str, facts: Facts) -> bool:
    """Whether the run left what a detector reads under this name.

    The name is "rescored" (answers scored again), "kept" (skills measured before and after
    training), an attribute of `View`, or a metric.
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
    Detector("plateau", scoring.plateau, reads=("groups_effective",)),
    Detector("solved", groups.solved, reads=("groups_too_easy",)),
    Detector("reward_falls", scoring.reward_falls, reads=("reward_mean",)),
    Detector("worse_start", setbacks.worse_start, _TRAINERS, live=False),
    Detector("leak", setbacks.leak, _TRAINERS, live=False),
    Detector("contradictory_rows", setbacks.contradictory_rows, ("sft",), live=False),
    Detector("duplicates", setbacks.duplicates, ("sft",), live=False),
    Detector("pairs_alike", setbacks.pairs_alike, ("dpo",), live=False),
    Detector("rows_disagree", setbacks.rows_disagree, ("sft",), ("heldout_loss",), live=False),
    Detector("other_exam", setbacks.other_exam, _TRAINERS, live=False),
    Detector("constant_answer", setbacks.constant_answer, _TRAINERS, live=False),
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
    Detector(
        "memorised_rows",
        setbacks.memorised_rows,
        ("sft",),
        ("heldout_success", "heldout_loss"),
        live=False,
    ),
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
    """Every finding on a run, causes before effects; those that did no harm or are mere effects of
    others are left out.

    With `live`, only the detectors run that can judge a run while training is under way.
    """
    findings = []
    for detector in DETECTORS:
        if facts.algorithm not in detector.algorithms:
            continue
        if live and not detector.live:
            continue
        finding = detector.find(facts)
        if finding is not None:
            findings.append(finding)
    findings += _open_alerts_without_finding(facts, {finding.id for finding in findings})
    harmful = [finding for finding in findings if not _did_no_harm(finding, facts)]
    root_findings = _without_effects(harmful)
    losses = [facts.heldout_drop]  # of held-out score
    # Steps that broke the policy also cost what the other findings lost, such as skills.
    is_unstable = any(finding.id == "unstable" for finding in root_findings)
    if is_unstable or _is_broken(root_findings):
        losses += [finding.cost for finding in root_findings]
    with_loss_as_cost = with_costs(root_findings, max(losses))
    ranked_findings = ranked(_with_cost_of_unsolved_tasks(with_loss_as_cost, facts))
    return _cuts_behind_too_hard(ranked_findings, facts)


def _open_alerts_without_finding(facts: Facts, found_ids: Collection[str]) -> list[Finding]:
    """The alerts in `facts.alerts` (those of the run that are not over) that no finding repeats.
    `found_ids` are the ids of the findings; an alert has the id of the finding that it was.

    Returns [] for a run with a verdict whose last evaluation is no worse than step 0: what it
    warned of on the way did no harm.
    """
    has_verdict = facts.comparison is not None  # otherwise the run may still get worse
    if has_verdict and _ended_no_worse(facts.against_start):
        return []
    return [alert for alert in facts.alerts if alert.id not in found_ids]


def _ended_no_worse(against_start: StartComparison | None) -> bool:
    """Whether the last evaluation is at least as good as step 0; False if they were not
    compared."""
    if against_start is None:
        return False
    before, after = against_start.before, against_start.after
    if before is None or after is None:
        return False
    return after <= before if against_start.measure == "loss" else after >= before


def _did_no_harm(finding: Finding, facts: Facts) -> bool:
    """Whether a finding on the course of a run can be dropped: the run ended better than it began,
    and near its best held-out success.

    Findings that are known causes stay, and so does whatever was measured on answers or rows.
    """
    if finding.is_cause or finding.id not in _ABOUT_THE_COURSE:
        return False
    if facts.comparison is None or facts.comparison.outcome.verdict != "better":
        return False
    heldout_shares = facts.curve_values("heldout_success")
    if not heldout_shares:
        return True
    return heldout_shares[-1] >= max(heldout_shares) - limits.SMALL_SUCCESS_CHANGE


def _without_effects(findings: Sequence[Finding]) -> list[Finding]:
    """The findings. If the learning rate was so high that it broke the policy, those that are only
    effects of that are left out.

    A policy that its steps have broken answers badly in every way: the answers of a group are
    alike, answers run on. Known causes stay.
    """
    if not _is_broken(findings):
        return list(findings)
    return [
        finding
        for finding in findings
        if finding.is_cause or finding.id not in _EFFECTS_OF_BROKEN_POLICY
    ]


def _is_broken(findings: Sequence[Finding]) -> bool:
    """Whether too high a learning rate broke the policy: a result fell below the start, and the
    advice of that finding is a lower learning rate."""
    return any(
        finding.id in _FALLS and finding.lever.setting == "learning_rate" for finding in findings
    )


def with_costs(findings: Sequence[Finding], heldout_loss: float) -> list[Finding]:
    """Return the findings with the cost of a fallen held-out score.

    A finding that may have caused the fall costs at least `heldout_loss`, the share of the score
    that was lost; one whose cost is higher keeps it.
    """
    return _with_least_cost(findings, _CAUSES_OF_A_FALL, heldout_loss)


def _with_cost_of_unsolved_tasks(findings: Sequence[Finding], facts: Facts) -> list[Finding]:
    """The findings; those that may have kept the run from learning get the share of unsolved
    held-out tasks as their cost.

    The costs stay as they are if the run improved, or fell below its start.
    """
    return _with_least_cost(findings, _CAUSES_OF_NOT_LEARNING, _share_never_learnt(facts))


def _with_least_cost(
    findings: Sequence[Finding], ids: Collection[str], least_cost: float
) -> list[Finding]:
    """The findings; those with one of `ids` cost at least `least_cost`."""
    with_cost = []
    for finding in findings:
        if finding.id in ids:
            finding = replace(finding, cost=max(finding.cost, least_cost))
        with_cost.append(finding)
    return with_cost


def _cuts_behind_too_hard(in_order: list[Finding], facts: Facts) -> list[Finding]:
    """The findings in order; the one on cut answers ("truncation") moves behind "too_hard" if a
    higher token limit would not help.

    Otherwise it comes first: a cut answer cannot be right, however easy the task is.
    """
    by_id = {finding.id: finding for finding in in_order}
    truncation, too_hard = by_id.get("truncation"), by_id.get("too_hard")
    if truncation is None or too_hard is None or not answers.uncut_answers_fail_too(facts):
        return in_order
    others = [finding for finding in in_order if finding is not truncation]
    place = others.index(too_hard) + 1
    return [*others[:place], truncation, *others[place:]]


def _share_never_learnt(facts: Facts) -> float:
    """The share of held-out tasks unsolved at the end of a run that learnt nothing.

    Returns 0.0 if clearly more, or clearly fewer, tasks are solved than at the start, or if the
    share is not known.
    """
    solved_shares = facts.curve_values("heldout_success")  # one for each evaluation
    if len(solved_shares) < 2 or facts.heldout_drop > 0:
        return 0.0
    best_gain = max(solved_shares) - solved_shares[0]
    if best_gain > limits.SMALL_SUCCESS_CHANGE:
        return 0.0
    return 1 - solved_shares[-1]


def not_judged(facts: Facts) -> list[str]:
    """Ids of the detectors for this kind of run that found nothing to read."""
    return [
        detector.id
        for detector in DETECTORS
        if facts.algorithm in detector.algorithms and not detector.could_judge(facts)
    ]
