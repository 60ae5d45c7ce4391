"""Which rows a verdict compares.

For a training run: step 0 and the checkpoint that is its result. For an evaluation: the first model
and another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.evidence.stats.results import TEST, best_step, in_half
from engine.evidence.verdict.comparison import compare_rows
from engine.evidence.verdict.contamination import taught_tasks, without_tasks
from engine.home.halves import choosing
from engine.home.run_dir import RunDir
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

    Tasks that stand in training rows are left out, and so are models without rows. A model that was
    named before gets its position as a suffix, as in "model (#2)". {} for other kinds of run, and
    where the config is missing.
    """
    models: dict[str, list[EvaluationRow]] = {}
    taught_ids = taught_tasks(run_dir)
    refs = config.model_refs if isinstance(config, AskingConfig) else []
    for index, ref in enumerate(refs):
        rows = without_tasks(read_evaluation(run_dir.model_evals(index)), taught_ids)
        if rows:
            models[ref if ref not in models else f"{ref} (#{index + 1})"] = rows
    return models


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


def _step_named_best(run_dir: RunDir) -> int | None:
    """The step of the checkpoint that the run named its best; None where it named none."""
    best_folder = run_dir.resolve_checkpoint("best")
    if best_folder is None:
        return None
    # A checkpoint's folder is named after its step, as in step_000020.
    _, _, digits = best_folder.name.rpartition("_")
    return int(digits)
