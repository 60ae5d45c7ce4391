"""Which rows a verdict compares.

For a training run: step 0 and the checkpoint that is its result. For an evaluation: the first model
and another one.
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
    """The rows that are compared, with a name for each side.

    Attributes:
        half: `TEST`, or "all" where the held-out tasks have no halves.
        step: of the checkpoint on the `after` side; None before one was evaluated.
        taught: how many held-out tasks were left out because training rows teach them.
        dev: whether dev tasks chose the checkpoint, so that `half` is all held-out tasks.
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
    """The held-out rows of step 0 and of the checkpoint that stands for the run's result.

    Where the held-out tasks are split into halves, only the rows of the test half: the other half
    was used to choose the checkpoint. Tasks that stand in the training rows are left out. The
    `after` side is empty until a checkpoint was evaluated.
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


def is_chosen_on_dev(run_dir: RunDir) -> bool:
    """Whether dev tasks choose the checkpoint of a training run."""
    half = choosing(run_dir)
    return half is not None and half.side == "dev"


def evaluation_sides(run_dir: RunDir, config: RunConfig | None) -> Sides | None:
    """The rows of the first model of an evaluation and of the model furthest ahead of it.

    None where fewer than two models have rows.
    """
    models = evaluated_models(run_dir, config)
    if len(models) < 2:
        return None
    first, *others = models
    best = max(others, key=lambda ref: compare_rows(models[first], models[ref]).lead)
    return Sides(models[first], models[best], before_name=first, after_name=best)


def evaluated_models(run_dir: RunDir, config: RunConfig | None) -> dict[str, list[EvaluationRow]]:
    """The models of an evaluation: model reference -> its rows, in the order of the config.

    Tasks that stand in training rows are left out, and so are those by which a checkpoint of one of
    the models was chosen (unless none would remain), and models without rows. A model that was
    named before gets its position as a suffix, as in "model (#2)". {} for other kinds of run, and
    where the config is missing.
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
    remaining = {name: without_tasks(rows, choosing_ids) for name, rows in models.items()}
    every_model_has_rows = bool(remaining) and all(remaining.values())
    return remaining if every_model_has_rows else models


def tasks_that_chose(home: Home, refs: Sequence[str], env_id: str) -> frozenset[str]:
    """Ids of the held-out tasks of `env_id` by which a checkpoint of one of the models was chosen.

    `refs` are model references; a base model, and a run with fewer than two checkpoints to choose
    from, chose by none.
    """
    run_ids = dict.fromkeys(trained_by(home, ref) for ref in refs)
    task_ids: set[str] = set()
    for run_id in run_ids:
        if run_id and _had_choice(home.run(run_id), env_id):  # "" for a base model
            task_ids |= _chosen_by(home.run(run_id))
    return frozenset(task_ids)


def _had_choice(run: RunDir, env_id: str) -> bool:
    """Whether a run chose among several checkpoints on this version of an environment."""
    config = run.find_config()
    # With step 0 and one later evaluation there was nothing to choose from.
    return config is not None and config.env_id == env_id and len(run.eval_steps()) > 2


def _chosen_by(run: RunDir) -> frozenset[str]:
    """Ids of the tasks that a run's first evaluation says choose the checkpoint."""
    first = read_evaluation(run.evals(run.eval_steps()[0]))
    return frozenset(row.task for row in in_half(first, VALIDATION))


def tasks_left_out_sentence(run_dir: RunDir, config: RunConfig | None) -> list[str]:
    """A sentence about the tasks of an evaluation that chose a checkpoint of its models.

    A list of that one sentence; [] where there is no such task, or where `config` is not that of a
    run that asks models.
    """
    if not isinstance(config, AskingConfig):
        return []
    chose_ids = tasks_that_chose(run_dir.home, config.model_refs, config.env_id)
    asked_ids = {row.task for row in read_evaluation(run_dir.model_evals(0))}
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
    """The evaluated step that stands for the run's result; None while no step was evaluated.

    The candidates are the steps evaluated on the test half (the tasks that choose no checkpoint);
    where no step was, all evaluated steps. Step 0, the start, is no candidate.
    """
    steps = [step for step in run_dir.eval_steps() if step > 0]
    tested_steps = [step for step in steps if in_half(read_evaluation(run_dir.evals(step)), TEST)]
    candidates = tested_steps or steps
    if not candidates:
        return None
    named_best = _step_named_best(run_dir)
    if named_best in candidates:  # it need not be: the test half may not have been asked there
        return named_best
    best = best_step(run_dir, candidates)  # by its result on the validation half
    return candidates[-1] if best is None else best  # the newest, if none can be called the best


def step_of_checkpoint(run: RunDir, checkpoint: str) -> int | None:
    """The step of a checkpoint: 20 for "step20".

    Any other name, "" included, stands for the checkpoint that the run reports; None where no step
    was evaluated.
    """
    named_step = step_in_ref(f"@{checkpoint}")  # it reads references, such as "r-1@step20"
    return result_step(run) if named_step is None else named_step


def is_same_checkpoint(home: Home, ref: str, asked: str) -> bool:
    """Whether two references name one checkpoint of a training run.

    `ref` is as `compare_runs` takes it: a run alone stands for the checkpoint that it reports.
    `asked` is as `evaluate` takes it: a run alone stands for its newest checkpoint.
    """
    # References are such as "r-1", "r-1@step20" or "r-1@best".
    run_id = trained_by(home, ref)
    asked_run_id, _, asked_checkpoint = asked.partition("@")
    if not run_id or asked_run_id != run_id:
        return False
    run = home.run(run_id)
    _, _, checkpoint = ref.partition("@")
    step = step_of_checkpoint(run, checkpoint)
    newest = None if asked_checkpoint else run.latest_checkpoint()
    if newest is not None:
        asked_step = checkpoint_step(newest)
    else:
        asked_step = step_of_checkpoint(run, asked_checkpoint)
    return step is not None and step == asked_step


def step_in_ref(ref: str) -> int | None:
    """The step in a model reference: 20 for `run@step20`; None where it names no step."""
    _, _, checkpoint = ref.partition("@")
    digits = checkpoint.removeprefix("step")
    return int(digits) if checkpoint.startswith("step") and digits.isdigit() else None


def _step_named_best(run_dir: RunDir) -> int | None:
    """The step of the checkpoint that the run named its best; None where it named none."""
    best_folder = run_dir.resolve_checkpoint("best")
    return None if best_folder is None else checkpoint_step(best_folder)


def checkpoint_step(folder: Path) -> int:
    """The step of a checkpoint, after which its folder is named, as in step_000020."""
    _, _, digits = folder.name.rpartition("_")
    return int(digits)
