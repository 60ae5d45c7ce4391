"""Which rows a verdict compares: of a training run step 0 and its result, of an evaluation the
first model and another."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.evidence.stats.results import TEST, best_step, in_half
from engine.evidence.verdict.comparison import compare_rows
from engine.evidence.verdict.contamination import taught_tasks, without_tasks
from engine.home.run_dir import RunDir
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.run_config import AskingConfig, RunConfig


@dataclass(frozen=True)
class Sides:
    """The rows that are compared.

    Attributes:
        half: `TEST`, or "all" where the held-out tasks have no halves.
        step: of the checkpoint on the `after` side; None before one was evaluated.
        taught: held-out tasks left out because training rows hold them.
    """

    before: Sequence[EvaluationRow]
    after: Sequence[EvaluationRow]
    before_name: str
    after_name: str
    half: str = "all"
    step: int | None = None
    taught: int = 0


def training_sides(run_dir: RunDir) -> Sides:
    """Step 0 and the checkpoint that stands for the result, on the test half."""
    step = result_step(run_dir)
    taught = taught_tasks(run_dir)
    before = without_tasks(read_evaluation(run_dir.evals(0)), taught)
    after = without_tasks(read_evaluation(run_dir.evals(step)), taught) if step is not None else []
    half = "all"
    if any(row.half for row in before):
        before, after, half = in_half(before, TEST), in_half(after, TEST), TEST
    name = "no step yet" if step is None else f"step {step}"
    return Sides(before, after, "step 0", name, half, step, len(taught))


def evaluation_sides(run_dir: RunDir, config: RunConfig | None) -> Sides | None:
    """The first model and the one furthest ahead of it, None with fewer than two."""
    models = evaluated_models(run_dir, config)
    if len(models) < 2:
        return None
    first, *others = models
    main = max(others, key=lambda ref: compare_rows(models[first], models[ref]).lead)
    return Sides(models[first], models[main], first, main)


def evaluated_models(run_dir: RunDir, config: RunConfig | None) -> dict[str, list[EvaluationRow]]:
    """Rows by model reference, in the order the models were asked for; taught tasks left out."""
    models: dict[str, list[EvaluationRow]] = {}
    taught = taught_tasks(run_dir)
    refs = config.model_refs if isinstance(config, AskingConfig) else []
    for index, ref in enumerate(refs):
        rows = without_tasks(read_evaluation(run_dir.model_evals(index)), taught)
        if rows:
            models[ref if ref not in models else f"{ref} (#{index + 1})"] = rows
    return models


def result_step(run_dir: RunDir) -> int | None:
    """The evaluated step that stands for the run's result, None before there is one.

    The checkpoint the run named its best, where the test half was asked of it; else the best by
    the validation half among the steps that were asked the test half.
    """
    steps = [step for step in run_dir.eval_steps() if step > 0]
    tested = [step for step in steps if in_half(read_evaluation(run_dir.evals(step)), TEST)]
    candidates = tested or steps
    if not candidates:
        return None
    named = run_dir.resolve_checkpoint("best")
    if named is not None and (step := int(named.name.rpartition("_")[2])) in candidates:
        return step
    best = best_step(run_dir, candidates)
    return candidates[-1] if best is None else best
