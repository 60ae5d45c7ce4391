"""What a verdict says beside its comparison.

That is: what the reward did if success ties, whether far more answers are cut than before, the
result of the environment's reward audit, how many scores are missing, whether the expectation came
true, and the calls to make next.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.files import read_lines, read_object
from engine.core.format import whole_percent
from engine.core.hints import Call
from engine.evidence.stats.basics.target import target_in
from engine.evidence.stats.inference import PairedVerdict
from engine.evidence.stats.power import tasks_for_share
from engine.evidence.stats.results import TEST, Level, rounded, show_change
from engine.evidence.verdict.comparison import Comparison, calls_for_errors, compare_rows
from engine.evidence.verdict.sides import Sides
from engine.home.owner_marks import is_of_sealed
from engine.home.run_dir import RunDir
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.prompt_line import chosen_prompt
from engine.records.run_config import LearningConfig, PromptConfig, RunConfig, TrainConfig

_OTHER_HALF = ", half of its eval_rows: the other half chose the checkpoint"
_CUT_MOVED = 0.2  # a change of the share of cut answers from which it is reported
_FAILED_AUDIT = "risk"
_FREQUENT = 0.1  # one answer to all tasks is no rival if it is right on a smaller share of them
_TASK_BYTES = 20_000_000  # read of the task rows
_SHOWN_CHARS = 40  # of an answer in a sentence
# Without a target a model that solves less than this share of its tasks is trained on, not served.
ENOUGH = 0.5
# Success from which GRPO learns from a model: a third of its groups of eight answers differ.
_GRPO_FROM = 0.05


def tie_sentences(sides: Sides, comparison: Comparison) -> list[str]:
    """Sentences on the change of the reward and of the cut answers, if success is the same on every
    task.

    Returns [] if success changed on any task, or if something other than success was compared.
    """
    outcome = comparison.outcome
    is_tie = outcome.n > 0 and not outcome.gained and not outcome.lost
    if comparison.measure != "success" or not is_tie:
        return []
    return [*_reward_sentence(sides), *_cut_sentence(sides)]


def _reward_sentence(sides: Sides) -> list[str]:
    """The change of the reward on tasks where success ties, as a list of one sentence.

    Returns [] if the mean reward did not change, or was not measured on both sides.
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
    """Copies of the rows without success, so that a comparison of them compares their rewards."""
    return [row.model_copy(update={"success": None}) for row in rows]


def _cut_sentence(sides: Sides) -> list[str]:
    """A sentence that far more or far fewer answers are cut than before, as a list of one; else
    []."""
    before, after = _cut_share(sides.before), _cut_share(sides.after)
    if abs(after - before) < _CUT_MOVED:
        return []
    return [f"Answers cut by a limit went from {whole_percent(before)} to {whole_percent(after)}."]


def _cut_share(rows: Sequence[EvaluationRow]) -> float:
    """The share of the rows whose answer was cut by a limit on tokens or turns; 0.0 for no rows."""
    return sum(row.cut for row in rows) / len(rows) if rows else 0.0


@dataclass(frozen=True)
class ConstantAnswer:
    """One and the same answer to every task, by which a model is not shown to do better.

    Attributes:
        text: the most frequent reference answer; "" if the tasks are a sealed exam.
        right: the tasks on which it is right.
        tasks: the tasks with a reference answer.
    """

    text: str
    right: int
    tasks: int

    @property
    def share(self) -> float:
        """The share of the tasks on which it is right."""
        return self.right / self.tasks

    def to_json(self) -> dict[str, object]:
        """The answer with the share of the tasks on which it is right, as a JSON object."""
        return {"answer": self.text[:_SHOWN_CHARS], "right": round(self.share, 4)}

    @property
    def sentence(self) -> str:
        """What a model that always gives this answer would reach."""
        answer = repr(self.text[:_SHOWN_CHARS]) if self.text else "the same"
        return (
            f"Always answering {answer} would be right on {self.right} of {self.tasks} of these "
            f"tasks ({whole_percent(self.share)}): this model is not shown to do better than that."
        )


def constant_answer(
    rows: Sequence[EvaluationRow], success: Level | None, config: RunConfig | None
) -> ConstantAnswer | None:
    """The most frequent reference answer, if giving it to every task might do as well as the model.

    On tasks with few different answers a model can gain much by a correct format and guesses; this
    rival shows it. Its share of right tasks is compared with the 95 % interval of the model's
    success. Returns None if

    - the interval lies above that share: the model does better
    - the share is below `_FREQUENT`
    - success was not measured, `config` is None, or no task has a reference answer

    Args:
        rows: the model's evaluation, a row for each answer.
        success: the model's share of right answers in `rows`, with its interval; None if unknown.
        config: the configuration of the run, which names the tasks. If they are a sealed exam, the
            text of the result is "".
    """
    if success is None or success.low is None or config is None:
        return None
    answers = _reference_answers(config, {row.task for row in rows})
    if not answers:
        return None
    ((most_frequent, count),) = Counter(answers).most_common(1)
    shown_text = "" if is_of_sealed(config) else most_frequent  # an exam's answers stay secret
    constant = ConstantAnswer(shown_text, right=count, tasks=len(answers))
    model_beats_it = success.low > constant.share  # even by the low end of the interval
    if constant.share < _FREQUENT or model_beats_it:
        return None
    return constant


def sentences_on(constant: ConstantAnswer | None) -> list[str]:
    """The sentence on the one answer to all tasks that would do as well; [] if there is none."""
    return [constant.sentence] if constant else []


def rival_constant(
    sides: Sides, comparison: Comparison, config: RunConfig | None
) -> ConstantAnswer | None:
    """The one answer to all tasks that would do as well as the model on the `after` side of a
    comparison, as `constant_answer` finds it.

    Returns None if there is none, or if something other than success was compared. `config` is the
    configuration of the run, which names the tasks; None if it is missing or damaged.
    """
    if comparison.measure != "success":
        return None
    success_after = comparison.after  # the model's share of right answers, with its interval
    return constant_answer(sides.after, success_after, config)


def _reference_answers(config: RunConfig, tasks: Collection[str]) -> list[str]:
    """The reference answers of these tasks of the run's environment; answers of several turns are
    left out.

    Args:
        tasks: ids of the tasks. Only the first `_TASK_BYTES` of the file of tasks are read.
    """
    path = Path(config.env_dir) / "tasks.jsonl"
    if not config.env_dir or not path.exists():
        return []
    rows, _ = read_lines(path, 0, max_bytes=_TASK_BYTES)
    texts = []
    for row in rows:
        turns = row.get("answer") or []
        if str(row.get("id")) in tasks and len(turns) == 1:
            texts.append(str(turns[0].get("content") or "").strip())
    return [text for text in texts if text]


def audit_sentences(config: RunConfig | None) -> list[str]:
    """A sentence that the reward audit of the run's environment failed, as a list of one. Returns
    [] if the audit did not fail."""
    if not audit_risk(config) or config is None:
        return []
    audit = read_object(Path(config.env_dir) / "audit.json")
    first_risks = (audit.get("risks") or [])[:2]  # kinds of wrong answers that are paid
    risks = ", ".join(str(risk) for risk in first_risks)
    remark = f" ({risks} are paid)" if risks else ""
    return [f"The reward audit of this environment says risk{remark}: a score may not mean right."]


def audit_risk(config: RunConfig | None) -> str:
    """The word "risk" if the reward audit of the run's environment failed, else ""."""
    if config is None or not config.env_dir:
        return ""
    verdict = read_object(Path(config.env_dir) / "audit.json").get("verdict")
    return _FAILED_AUDIT if verdict == _FAILED_AUDIT else ""


def no_halves_warning(half: str, checkpoint_count: int) -> list[str]:
    """A warning if the checkpoint was chosen on the tasks by which it is judged, else [].

    Args:
        half: the held-out tasks on which the models are compared: `TEST`, the half that chose no
            checkpoint, or "all" if the tasks were not split.
        checkpoint_count: the number of evaluated checkpoints; a single one was not chosen.
    """
    was_chosen_on_them = half == "all" and checkpoint_count >= 2
    if not was_chosen_on_them:
        return []
    return [
        "The held-out tasks were not split into halves, so the checkpoint was chosen on "
        "the tasks it is reported on: the gain is flattered."
    ]


def missing_score_sentences(outcome: PairedVerdict) -> list[str]:
    """Sentences on tasks that were scored on one side only, and on answers whose scoring failed."""
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
    """Whether the expectation for a run came true: a verdict such as "better", or a target for its
    result.

    Returns None if nothing was expected or the verdict is unknown; for an expected verdict also if
    the actual one is inconclusive.
    """
    verdict = comparison.outcome.verdict
    target = target_in(expected)  # None if a verdict was expected
    if target is not None:
        after = comparison.after
        if not after or verdict == "unknown":
            return None
        return target.is_reached_by(after.value)
    if not expected or verdict in ("unknown", "inconclusive"):
        return None
    return verdict == expected


def target_sentences(expected: str, comparison: Comparison) -> list[str]:
    """Whether the result of a run reaches the target that was set at submit, as a list of one
    sentence. Returns [] without a target, or if nothing was compared."""
    target, after = target_in(expected), comparison.after
    if target is None or after is None or comparison.outcome.verdict == "unknown":
        return []
    is_share = comparison.measure == "success"
    return [target.sentence(after.value, (after.low, after.high), is_share=is_share)]


def calls_to_go_on(
    run: RunDir, config: LearningConfig | None, comparison: Comparison, *, is_constant: bool = False
) -> list[Call]:
    """The calls to suggest after a training run, by its verdict.

    If failed scorings decide the verdict, only calls that inspect them. A model is deployed only if
    it reaches its target (without a target: solves half of its tasks); a weaker one is trained
    further. `is_constant` means that one answer to every task would do as well: then the training
    tasks are evaluated first, to see what was learned.
    """
    run_id = run.id
    if comparison.errors_decide:
        return calls_for_errors(run_id)
    if isinstance(config, PromptConfig):
        return _calls_after_prompt(run, config, comparison)
    verdict, best_model = comparison.outcome.verdict, f"{run_id}@best"
    diagnose = Call("diagnose", {"run_id": run_id})
    if is_constant and config is not None and verdict == "better":
        ask_arguments = {"env_id": config.env_id, "models": [best_model], "split": "train"}
        return [Call("evaluate", ask_arguments), diagnose]
    if verdict == "unknown":
        return [Call("read_logs", {"run_id": run_id, "view": "events"})]
    show_changed = Call("read_rollouts", {"run_id": run_id, "pick": "changed"})
    if verdict != "better":
        is_as_expected = config is not None and config.expect == verdict
        return [show_changed] if is_as_expected else [show_changed, diagnose]
    if config is None or not _falls_short(config, comparison):
        return [show_changed, Call("deploy", {"run_id": best_model})]
    return [_call_to_train_on(run_id, config, comparison), diagnose, show_changed]


def _calls_after_prompt(run: RunDir, config: PromptConfig, comparison: Comparison) -> list[Call]:
    """The calls to suggest after a search for a prompt.

    They show what changed and the worst answers. If the new prompt is better, they train with it
    and evaluate it instead, on the environment version that has it.
    """
    show_changed = Call("read_rollouts", {"run_id": run.id, "pick": "changed"})
    show_worst = Call("read_rollouts", {"run_id": run.id, "pick": "worst"})
    new_prompt = chosen_prompt(run.prompts)  # None if the search chose none
    if new_prompt is None:
        return [show_worst]
    if comparison.outcome.verdict != "better":
        return [show_changed, show_worst]
    evaluate = Call("evaluate", {"env_id": new_prompt.env_id, "models": [config.model]})
    is_endpoint = config.models[0].endpoint is not None  # a model behind a URL cannot be trained
    if is_endpoint:
        return [evaluate, show_changed]
    train_arguments = {"env_id": new_prompt.env_id, "model": config.model, "algorithm": "grpo"}
    return [Call("submit_train", train_arguments), evaluate, show_changed]


def _falls_short(config: TrainConfig, comparison: Comparison) -> bool:
    """Whether the result misses its target; without a target, whether it solves less than half of
    its tasks (`ENOUGH`)."""
    if target_in(config.expect) is not None:
        return expectation_of(config.expect, comparison) is False
    solved_share = comparison.after.value if comparison.after else None
    if comparison.measure != "success" or solved_share is None:
        return False
    return solved_share < ENOUGH


def _call_to_train_on(run_id: str, config: TrainConfig, comparison: Comparison) -> Call:
    """The call that trains the result further.

    After SFT that is GRPO if enough tasks are solved for groups to differ; else the same algorithm
    with the settings that the user gave. The target is passed on.
    """
    arguments: dict[str, object] = {"env_id": config.env_id, "model": f"{run_id}@best"}
    solved_share = (comparison.after.value if comparison.after else None) or 0.0
    groups_differ = comparison.measure == "success" and solved_share >= _GRPO_FROM
    if config.algorithm == "sft" and groups_differ:
        arguments["algorithm"] = "grpo"
    else:
        arguments |= {"algorithm": config.algorithm, **_given_settings(config)}
    if target_in(config.expect) is not None:
        arguments["expect"] = config.expect
    return Call("submit_train", arguments)


def _given_settings(config: TrainConfig) -> dict[str, object]:
    """{"settings": the settings that the user gave}, for the arguments of a call; {} if none were
    given."""
    values, sources = config.settings.model_dump(), config.sources
    chosen_by_user = {name: values[name] for name in sources if sources[name] == "user"}
    return {"settings": chosen_by_user} if chosen_by_user else {}


def note_on_tasks_needed(comparison: Comparison, half: str) -> list[str]:
    """A note if too few tasks were compared to show a change of 5 points of success, as a list of
    one.

    Returns [] if there were enough, or if success was not compared. `half` is the half of the
    held-out tasks that was compared ("all" without halves); for the test half the note adds that
    the other half chose the checkpoint.
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
