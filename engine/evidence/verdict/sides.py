"""Which rows a verdict compares: the two sides "before" and "after".

For a training run: the evaluation of step 0, and that of the checkpoint which is its result. For an
evaluation: the first model, and the other model that is furthest ahead of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.evidence.stats.results import TEST, VALIDATION, best_step, in_half
from engine.evidence.verdict.comparison import compare_rows
from engine.evidence.verdict.contamination import taught_tasks, without_tasks
from engine.evidence.verdict.lineage import trained_by
from engine.home.halves import choosing
from engine.home.run_dir import Home, RunDir
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.run_config import AskingConfig, RunConfig


@dataclass(frozen=True)
class Sides:
    """The evaluation rows that are compared, with a name for each side.

    Attributes:
        half: `TEST`, or "all" if the held-out tasks are not split into a validation half and a test
            half.
        step: the step of the checkpoint on the `after` side; None until one was evaluated.
        taught: how many held-out tasks were left out because training rows teach them.
        dev: whether dev tasks chose the checkpoint, so that all held-out tasks can be compared.
    """

    before: Sequence[EvaluationRow]
    after: Sequence[EvaluationRow]
    before_name: str
    after_name: str
    half: str = "all"
    step: int | None = None
    taught: int = 0
    dev: bool = False


def training_sides(run_dir: RunDir) -> Sides:
    """The held-out rows of step 0 (before) and of the checkpoint that is the run's result (after).

    If the held-out tasks are split into halves, only the rows of the test half are returned: the
    validation half chose the checkpoint. Tasks that training rows teach are left out. The `after`
    side is empty until a checkpoint was evaluated.
    """
    step = result_step(run_dir)
    taught_ids = taught_tasks(run_dir)
    before = without_tasks(read_evaluation(run_dir.evals(0)), taught_ids)
    after: list[EvaluationRow] = []
    if step is not None:
        after = without_tasks(read_evaluation(run_dir.evals(step)), taught_ids)
    half = "all"
    if any(row.half for row in before):
        before, after = in_half(before, TEST), in_half(after, TEST)
        half = TEST
    return Sides(
        before,
        after,
        before_name="step 0",
        after_name="no step yet" if step is None else f"step {step}",
        half=half,
        step=step,
        taught=len(taught_ids),
        dev=is_chosen_on_dev(run_dir),
    )


def reason_for_missing_rows(sides: Sides) -> str:
    """Why the start or the result of a training run has no answers. "" if both have."""
    if not sides.before and sides.taught:  # all tasks were left out
        return "every reported held-out task stands in the training rows"
    if not sides.before:
        return "there is no evaluation before training (step 0)"
    if sides.step is None:
        return "there is no evaluation after step 0"
    if not sides.after:
        return f"the report half was not played with {sides.after_name}; it is, when the run ends"
    return ""


def is_chosen_on_dev(run_dir: RunDir) -> bool:
    """Whether dev tasks choose the checkpoint of a training run."""
    half = choosing(run_dir)
    return half is not None and half.side == "dev"


def evaluation_sides(run_dir: RunDir, config: RunConfig | None) -> Sides | None:
    """The rows of an evaluation's first model (before) and of the model furthest ahead of it
    (after).

    Returns None if fewer than two models have rows.
    """
    models = evaluated_models(run_dir, config)
    if len(models) < 2:
        return None
    first, *others = models

    def lead_over_first(ref: str) -> float:
        """How far a model is ahead of the first; below 0 if it is behind."""
        return compare_rows(models[first], models[ref]).lead

    best = max(others, key=lead_over_first)
    return Sides(models[first], models[best], before_name=first, after_name=best)


def evaluated_models(run_dir: RunDir, config: RunConfig | None) -> dict[str, list[EvaluationRow]]:
    """The rows of each model of an evaluation, by model reference, in the order of the config.

    Left out are tasks that training rows teach, models without rows, and tasks by which a
    checkpoint of one of the models was chosen (these stay if a model would have no rows otherwise).
    The second mention of a model gets its position as a suffix, as in "model (#2)". Returns {} for
    other kinds of run, and if the config is missing.
    """
    if not isinstance(config, AskingConfig):
        return {}
    models: dict[str, list[EvaluationRow]] = {}
    taught_ids = taught_tasks(run_dir)
    for index, ref in enumerate(config.model_refs):
        rows = without_tasks(read_evaluation(run_dir.model_evals(index)), taught_ids)
        if rows:
            name = ref if ref not in models else f"{ref} (#{index + 1})"
            models[name] = rows
    choosing_ids = tasks_that_chose(run_dir.home, config.model_refs, config.env_id)
    unbiased = {name: without_tasks(rows, choosing_ids) for name, rows in models.items()}
    every_model_has_rows = bool(unbiased) and all(unbiased.values())
    return unbiased if every_model_has_rows else models


def tasks_that_chose(home: Home, refs: Sequence[str], env_id: str) -> frozenset[str]:
    """Ids of the held-out tasks of `env_id` by which a checkpoint of one of the models was chosen.

    `refs` are model references. A base model has no such tasks, and neither has a run with fewer
    than two checkpoints to choose from.
    """
    run_ids = dict.fromkeys(trained_by(home, ref) for ref in refs)  # "" for a base model
    task_ids: set[str] = set()
    for run_id in run_ids:
        if run_id and _had_several_checkpoints(home.run(run_id), env_id):
            task_ids |= _tasks_that_chose_in(home.run(run_id))
    return frozenset(task_ids)


def _had_several_checkpoints(run: RunDir, env_id: str) -> bool:
    """Whether a run on this environment version had several checkpoints to choose from."""
    config = run.find_config()
    is_on_version = config is not None and config.env_id == env_id
    # With step 0 and one later evaluation there was nothing to choose from.
    return is_on_version and len(run.eval_steps()) > 2


def _tasks_that_chose_in(run: RunDir) -> frozenset[str]:
    """Ids of the tasks that chose the checkpoint: the validation half of the run's first
    evaluation."""
    first_step = run.eval_steps()[0]  # every later evaluation asks the same tasks
    rows = read_evaluation(run.evals(first_step))
    return frozenset(row.task for row in in_half(rows, VALIDATION))


def tasks_left_out_sentence(run_dir: RunDir, config: RunConfig | None) -> list[str]:
    """A sentence that some tasks of an evaluation chose a checkpoint of its models, as a list of
    one.

    Returns [] if there is no such task, or if `config` is not that of a run that asks models.
    """
    if not isinstance(config, AskingConfig):
        return []
    chose_ids = tasks_that_chose(run_dir.home, config.model_refs, config.env_id)
    asked_ids = {row.task for row in read_evaluation(run_dir.model_evals(0))}  # by the first model
    left_out_ids = asked_ids & chose_ids
    if not left_out_ids:
        return []
    counts = f"{len(left_out_ids)} of the {len(asked_ids)} tasks asked"
    text = f"{counts} chose a checkpoint of these models"
    if left_out_ids == asked_ids:
        return [f"{text}, which flatters it: evaluate on others."]
    return [
        f"{text} and are left out: the numbers are of the other {len(asked_ids - left_out_ids)}."
    ]


def result_step(run_dir: RunDir) -> int | None:
    """The evaluated step that is the run's result. Returns None while no step was evaluated.

    The candidates are the steps evaluated on the test half (the tasks that choose no checkpoint),
    or all evaluated steps if none was. Step 0, the model before training, is no candidate.
    """
    steps = [step for step in run_dir.eval_steps() if step > 0]
    tested_steps = [step for step in steps if in_half(read_evaluation(run_dir.evals(step)), TEST)]
    candidates = tested_steps or steps
    if not candidates:
        return None
    named_best = _step_named_best(run_dir)
    if named_best in candidates:  # the test half may not have been evaluated at that step
        return named_best
    best = best_step(run_dir, candidates)  # by its result on the validation half
    return candidates[-1] if best is None else best  # the newest, if none can be called the best


def step_of_checkpoint(run: RunDir, checkpoint: str) -> int | None:
    """The step of a checkpoint: 20 for "step20".

    Any other name, also "", means the checkpoint that the run reports. Returns None if no step was
    evaluated.
    """
    named_step = step_in_ref(f"@{checkpoint}")  # "@" because it takes whole model references
    return result_step(run) if named_step is None else named_step


def is_same_checkpoint(home: Home, ref: str, asked: str) -> bool:
    """Whether two references name the same checkpoint of a training run. They are read differently:

    `ref` as `compare_runs` reads it: a run id alone means the checkpoint that the run reports.
    `asked` as `evaluate` reads it: a run id alone means the run's newest checkpoint.
    """
    # References are such as "r-1", "r-1@step20" or "r-1@best".
    run_id = trained_by(home, ref)
    asked_run_id, _, asked_checkpoint = asked.partition("@")
    if not run_id or asked_run_id != run_id:
        return False
    run = home.run(run_id)
    _, _, checkpoint = ref.partition("@")
    step = step_of_checkpoint(run, checkpoint)
    newest = run.latest_checkpoint()
    if not asked_checkpoint and newest is not None:
        asked_step = checkpoint_step(newest)
    else:
        asked_step = step_of_checkpoint(run, asked_checkpoint)
    return step is not None and step == asked_step


def step_in_ref(ref: str) -> int | None:
    """The step in a model reference: 20 for "r-1@step20". Returns None if it names no step."""
    _, _, checkpoint = ref.partition("@")
    digits = checkpoint.removeprefix("step")
    if not checkpoint.startswith("step") or not digits.isdigit():
        return None
    return int(digits)


def _step_named_best(run_dir: RunDir) -> int | None:
    """The step of the checkpoint that the run itself marked as its best. Returns None if it marked
    none."""
    best_folder = run_dir.resolve_checkpoint("best")
    return None if best_folder is None else checkpoint_step(best_folder)


def checkpoint_step(folder: Path) -> int:
    """The step of a checkpoint, read from the name of its folder: 20 for step_000020."""
    _, _, digits = folder.name.rpartition("_")
    return int(digits)
