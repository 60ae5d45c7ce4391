"""What a verdict says beside its comparison: the reward where success ties, answers that are cut
far more often than before, the word of the environment's reward audit, scores that are missing,
whether what was expected came true, and the calls that go on from it."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from engine.core.files import read_lines, read_object
from engine.core.format import whole_percent
from engine.core.hints import Call
from engine.evidence.stats.basics.target import target_in
from engine.evidence.stats.inference import PairedVerdict
from engine.evidence.stats.power import tasks_for_share
from engine.evidence.stats.results import TEST, rounded, show_change
from engine.evidence.verdict.comparison import Comparison, calls_for_errors, compare_rows
from engine.evidence.verdict.sides import Sides
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import RunConfig, TrainConfig

_OTHER_HALF = ", half of its eval_rows: the other half chose the checkpoint"
_CUT_MOVED = 0.2  # a share of cut answers that moved by this much is worth a word
_FAILED_AUDIT = "risk"
_FREQUENT = 0.1  # share of the tasks below which one answer to all of them is no rival
_TASK_BYTES = 20_000_000  # read of the task rows
_SHOWN_CHARS = 40  # of an answer in a sentence
# Without a target a model that solves less than this share of its tasks is trained on, not served.
ENOUGH = 0.5
# Success from which GRPO learns from a model: a third of its groups of eight answers differ.
_GRPO_FROM = 0.05


def tie_sentences(sides: Sides, comparison: Comparison) -> list[str]:
    """Where success is the same on every task: what the reward did, and how many answers are cut.

    [] where success moved on any task, or where something else was compared.
    """
    outcome = comparison.outcome
    if comparison.measure != "success" or not outcome.n or outcome.gained or outcome.lost:
        return []
    return [*_reward_sentence(sides), *_cut_sentence(sides)]


def _reward_sentence(sides: Sides) -> list[str]:
    """What the reward did where success ties, as a list of one sentence.

    [] where the reward did not move either, or was not measured on both sides.
    """
    comparison = compare_rows(_by_reward(sides.before), _by_reward(sides.after))
    before, after = comparison.outcome.before, comparison.outcome.after
    if comparison.measure != "reward" or before is None or after is None:
        return []
    if before == after:
        return []
    low, high = (show_change(end, "reward") for end in comparison.interval)
    return [
        f"Success ties on every task; the reward went from {rounded(before):.3g} to "
        f"{rounded(after):.3g} (95 % interval of the change {low} to {high})."
    ]


def _by_reward(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """The rows without success, so that their reward is compared."""
    return [row.model_copy(update={"success": None}) for row in rows]


def _cut_sentence(sides: Sides) -> list[str]:
    """That far more or fewer answers are cut, as a list of one sentence; [] where it is not so."""
    before, after = _cut_share(sides.before), _cut_share(sides.after)
    if abs(after - before) < _CUT_MOVED:
        return []
    return [f"Answers cut by a limit went from {whole_percent(before)} to {whole_percent(after)}."]


def _cut_share(rows: Sequence[EvaluationRow]) -> float:
    """The share of the rows that a limit of length or turns cut; 0.0 for none."""
    return sum(row.cut for row in rows) / len(rows) if rows else 0.0


def constant_answer_sentences(
    sides: Sides, comparison: Comparison, config: RunConfig | None
) -> list[str]:
    """That a single answer to every task would do as well as the result, as a list of one sentence.

    A model that learns nothing but the form of an answer is better than one that lacks the form; on
    tasks of few different answers that reads like a success. [] where the 95 % interval of the
    result lies above the share of the most frequent reference answer, where that share is below
    `_FREQUENT`, and where success was not compared.
    """
    after = comparison.after
    if comparison.measure != "success" or after is None or after.low is None or config is None:
        return []
    answers = _reference_answers(config, {row.task for row in sides.after})
    if not answers:
        return []
    (constant, count), *_ = Counter(answers).most_common(1)
    share = count / len(answers)
    if share < _FREQUENT or after.low > share:
        return []
    return [
        f"Always answering {constant[:_SHOWN_CHARS]!r} would be right on {count} of {len(answers)} "
        f"of these tasks ({whole_percent(share)}): this model is not shown to do better than that."
    ]


def _reference_answers(config: RunConfig, tasks: Collection[str]) -> list[str]:
    """The reference answers of these tasks of a run's environment, those of a single turn of text.

    Only the first `_TASK_BYTES` of the file of tasks are read.
    """
    path = Path(config.env_dir) / "tasks.jsonl"
    if not config.env_dir or not path.exists():
        return []
    rows, _ = read_lines(path, 0, max_bytes=_TASK_BYTES)
    turns = [row.get("answer") or [] for row in rows if str(row.get("id")) in tasks]
    texts = [str(answer[0].get("content") or "").strip() for answer in turns if len(answer) == 1]
    return [text for text in texts if text]


def audit_sentences(config: RunConfig | None) -> list[str]:
    """That the reward audit of the run's environment failed, as a list of one sentence; else []."""
    if not audit_risk(config) or config is None:
        return []
    audit = read_object(Path(config.env_dir) / "audit.json")
    risks = ", ".join(str(risk) for risk in (audit.get("risks") or [])[:2])
    named = f" ({risks} are paid)" if risks else ""
    return [f"The reward audit of this environment says risk{named}: a score may not mean right."]


def audit_risk(config: RunConfig | None) -> str:
    """The word "risk" where the reward audit of the run's environment failed, else ""."""
    if config is None or not config.env_dir:
        return ""
    verdict = read_object(Path(config.env_dir) / "audit.json").get("verdict")
    return _FAILED_AUDIT if verdict == _FAILED_AUDIT else ""


def missing_score_sentences(outcome: PairedVerdict) -> list[str]:
    """Sentences on tasks scored on one side only, and on answers whose scoring failed."""
    notes = []
    if outcome.unpaired:
        notes.append(f"{outcome.unpaired} tasks were scored on one side only and are left out.")
    errors_before, errors_after = outcome.errors
    if errors_before + errors_after and outcome.verdict != "unknown":
        notes.append(
            f"Scoring failed on {errors_before} attempts before and {errors_after} after; "
            "they are left out of the comparison."
        )
    return notes


def expectation_of(expected: str, comparison: Comparison) -> bool | None:
    """Whether what was expected of a run came true: a verdict, or a target that its result reaches.

    None where nothing was expected, where the verdict is unknown, and for a predicted verdict also
    where it is inconclusive.
    """
    verdict = comparison.outcome.verdict
    target = target_in(expected)
    if target is not None:
        after = comparison.after
        return target.is_reached_by(after.value) if after and verdict != "unknown" else None
    if not expected or verdict in ("unknown", "inconclusive"):
        return None
    return verdict == expected


def target_sentences(expected: str, comparison: Comparison) -> list[str]:
    """Whether the result of a run reaches the target that was set at submit, as a list of one
    sentence; [] without a target, and where nothing was compared."""
    target, after = target_in(expected), comparison.after
    if target is None or after is None or comparison.outcome.verdict == "unknown":
        return []
    is_share = comparison.measure == "success"
    return [target.sentence(after.value, (after.low, after.high), is_share=is_share)]


def calls_to_go_on(
    run_id: str, config: TrainConfig | None, comparison: Comparison, *, is_constant: bool = False
) -> list[Call]:
    """The calls to suggest after a training run, by its verdict.

    Where failed scorings decide it, only those that look at them. A model is served only if it
    reaches its target, or without one solves half of its tasks; a weaker one is trained on.
    `is_constant`: one answer to every task would do as well. Then what was learned of the training
    rows is asked before anything is trained on.
    """
    if comparison.errors_decide:
        return calls_for_errors(run_id)
    if is_constant and config is not None and comparison.outcome.verdict == "better":
        best = f"{run_id}@best"
        ask = {"env_id": config.env_id, "models": [best], "split": "train"}
        return [Call("evaluate", ask), Call("diagnose", {"run_id": run_id})]
    verdict = comparison.outcome.verdict
    if verdict == "unknown":
        return [Call("read_logs", {"run_id": run_id, "view": "events"})]
    show_changed = Call("read_rollouts", {"run_id": run_id, "pick": "changed"})
    diagnose = Call("diagnose", {"run_id": run_id})
    if verdict != "better":
        return [show_changed, diagnose]
    if config is None or not _falls_short(config, comparison):
        return [show_changed, Call("deploy", {"run_id": f"{run_id}@best"})]
    return [_call_to_train_on(run_id, config, comparison), diagnose, show_changed]


def _falls_short(config: TrainConfig, comparison: Comparison) -> bool:
    """Whether the result misses its target; without one, whether it solves less than half."""
    if target_in(config.expect) is not None:
        return expectation_of(config.expect, comparison) is False
    level = comparison.after.value if comparison.after else None
    return comparison.measure == "success" and level is not None and level < ENOUGH


def _call_to_train_on(run_id: str, config: TrainConfig, comparison: Comparison) -> Call:
    """The call that trains the result further.

    After SFT it is GRPO, where enough tasks are solved for groups to differ; else the same
    algorithm with the settings that the user gave. A target is kept.
    """
    arguments: dict[str, object] = {"env_id": config.env_id, "model": f"{run_id}@best"}
    level = comparison.after.value if comparison.after else None
    can_select = comparison.measure == "success" and (level or 0.0) >= _GRPO_FROM
    if config.algorithm == "sft" and can_select:
        arguments["algorithm"] = "grpo"
    else:
        arguments |= {"algorithm": config.algorithm, **_given_settings(config)}
    if target_in(config.expect) is not None:
        arguments["expect"] = config.expect
    return Call("submit_train", arguments)


def _given_settings(config: TrainConfig) -> dict[str, object]:
    """The settings of a run that its user gave, as the argument of a call; {} for none."""
    values = config.settings.model_dump()
    given = {name: values[name] for name, source in config.sources.items() if source == "user"}
    return {"settings": given} if given else {}


def note_on_tasks_needed(comparison: Comparison, half: str) -> list[str]:
    """A note if fewer tasks were compared than a change of 5 points of success needs to show.

    [] if there were enough, or if success was not measured. `half` is the half of the held-out
    tasks that was compared, "all" without halves; for the test half the note adds that the other
    half chose the checkpoint.
    """
    outcome = comparison.outcome
    if comparison.measure != "success" or not outcome.n:
        return []
    needed_tasks = tasks_for_share(outcome)
    if needed_tasks <= outcome.n:
        return []
    other_half = _OTHER_HALF if half == TEST else ""
    return [
        f"About {needed_tasks} reported tasks would show a change of 5 points; this run has "
        f"{outcome.n}{other_half}."
    ]
