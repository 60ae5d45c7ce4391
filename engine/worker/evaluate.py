"""Evaluation of any models on one environment, and the learnability probe.

Every model plays the same tasks under the same sampling; models that share a base are loaded once
and told apart by their adapters. One attempt is greedy; several sample at temperature 1.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.core.files import Appender
from engine.evidence.stats.learnability import Sample, learnability
from engine.evidence.verdict.verdict import run_verdict
from engine.records.run_config import EvaluateConfig, ProbeConfig
from engine.records.settings import EvaluationSettings
from engine.runs import stored_answers
from engine.worker.components import Components, environment, prepare, tasks_of
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, Result, require
from engine.worker.core.trajectory import Group
from engine.worker.evaluation import heldout
from engine.worker.manifest import weight_hashes
from engine.worker.network.adapter import LoraSpec, read_adapter
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, fits
from engine.worker.update.checkpoint import require_base
from envs.json_types import TaskRow

# Tasks played between two looks at the stop flag: a cancelled evaluation ends within seconds.
SLICE = 256


def evaluate(job: Job[EvaluateConfig]) -> Result:
    """Play the tasks with every model; returns a summary per model.

    Raises:
        WorkerFailure: kind config or data.
        Stopped: when asked to stop; rows written so far stay.
    """
    config, settings = job.config, job.config.settings
    attempts = config.attempts
    models = config.models
    results: dict[int, Result] = {}
    job.event("started", f"{len(models)} models", total_steps=len(models))
    for base_path in dict.fromkeys(model.base_path for model in models):
        components = prepare(job, Path(base_path))
        with environment(components, job) as process:
            if process is None:
                raise WorkerFailure("config", "This environment scores nothing to evaluate.")
            weights = weight_hashes(job.run.home, components.base.path)
            context = components.context(process, settings)
            params = _sampling(settings, attempts)
            all_tasks = heldout.ordered(tasks_of(components, config.split), config.rows)
            half = heldout.halves(all_tasks)
            tasks = [t for t in all_tasks if fits(t, context, params)]
            asked = _Asked(tasks, half, context, components.sampler, params, attempts)
            require(tasks, f"{config.split} tasks that fit into max_length", "Raise max_length.")
            for index, model in enumerate(models):
                if model.base_path != base_path:
                    continue
                with adapter(components, model.adapter, weights):
                    groups = _play(job, index, model.ref, asked)
                if len(results) + 1 == len(models):
                    # Of the last model alone: by now the environment has scored all the others.
                    with _rescoring(job, components) as begin:
                        begin(job.run.model_evals(index), "", {task["id"]: task for task in tasks})
                results[index] = _result(model.ref, groups, len(all_tasks) - len(tasks))
                job.event("evaluated", f"{model.ref}: {_line(results[index])}", **results[index])
                job.metrics(len(results), {"model": model.ref} | _curves(groups))
    ordered = [results[i] for i in range(len(models))]
    summary = "; ".join(f"{r['ref']}: {_line(r)}" for r in ordered)
    evidence = run_verdict(job.run).to_json()
    return {
        "models": ordered,
        "verdict": evidence["verdict"],
        "evidence": evidence,
        "summary": summary,
    }


def probe(job: Job[ProbeConfig]) -> Result:
    """Sample a few training tasks `group_size` times: is there anything for GRPO to select?

    Returns what engine/evidence/stats/learnability.py makes of the samples.
    """
    config, settings = job.config, job.config.settings
    model = config.models[0]
    components = prepare(job, Path(model.base_path))
    group_size = settings.group_size
    job.event("started", "probe", total_steps=1)
    with environment(components, job) as process:
        if process is None:
            raise WorkerFailure("config", "This environment scores nothing to probe.")
        context = components.context(process, settings)
        params = SamplingParams.drawn(settings, settings.seed)
        pool = [t for t in tasks_of(components, "train") if fits(t, context, params)]
        tasks = heldout.ordered(pool, config.samples)
        require(tasks, "training tasks that fit into max_length", "Raise max_length.")
        weights = weight_hashes(job.run.home, components.base.path)
        with adapter(components, model.adapter, weights):
            groups = heldout.evaluate(tasks, context, components.sampler, params, group_size)
    job.run.model_evals(0).parent.mkdir(parents=True, exist_ok=True)
    with Appender(job.run.model_evals(0)) as file:
        heldout.write_rows(file, groups, {}, model.ref)
    result = learnability(samples_of(groups), group_size, settings.max_tokens).to_json()
    job.metrics(1, {k: v for k, v in result.items() if isinstance(v, float)})
    return result | {"verdict": "unknown", "ref": model.ref}


def samples_of(groups: Sequence[Group]) -> list[list[Sample]]:
    """Groups as the probe judges them."""
    return [
        [
            Sample(
                reward=t.reward,
                success=t.success,
                error=t.error is not None,
                tokens=t.trained_tokens,
                cut=t.cut,
                said=t.completion,
            )
            for t in group.members
        ]
        for group in groups
    ]


@contextmanager
def adapter(
    components: Components, folder: str | None, base_weights: dict[str, str]
) -> Iterator[None]:
    """Inside, the sampler carries the adapter in `folder` (or none); afterwards it is dropped."""
    if folder is None:
        components.sampler.load(None)
        yield
        return
    network = components.base.network
    require_base(Path(folder), base_weights)
    made = network.new_adapter(LoraSpec.from_folder(Path(folder)), seed=0)
    try:
        made.load(read_adapter(Path(folder)))
        components.sampler.load(made)
        yield
    finally:
        components.sampler.load(None)
        network.drop_adapter(made)


@dataclass(frozen=True)
class _Asked:
    """What every model of an evaluation is asked: `half` of each task by its id."""

    tasks: list[TaskRow]
    half: dict[str, str]
    context: RolloutContext
    sampler: Sampler
    params: SamplingParams
    attempts: int


def _sampling(settings: EvaluationSettings, attempts: int) -> SamplingParams:
    """One attempt is greedy, several are drawn."""
    if attempts == 1:
        return SamplingParams.greedy(settings, settings.seed)
    return SamplingParams.drawn(settings, settings.seed)


def _play(job: Job[EvaluateConfig], index: int, ref: str, asked: _Asked) -> list[Group]:
    """Play the tasks with model `index`, whatever the sampler carries, and write the answers."""
    path = job.run.model_evals(index)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    groups: list[Group] = []
    with Appender(path) as file:
        for start in range(0, len(asked.tasks), SLICE):
            job.check_stop()
            part = heldout.evaluate(
                asked.tasks[start : start + SLICE],
                asked.context,
                asked.sampler,
                asked.params,
                asked.attempts,
            )
            heldout.write_rows(file, part, asked.half, ref)
            groups += part
    return groups


def _rescoring(
    job: Job[EvaluateConfig], components: Components
) -> AbstractContextManager[stored_answers.Begin]:
    return stored_answers.beside(
        job.run, components.env, lambda why: job.event("rescore_skipped", why)
    )


def _result(ref: str, groups: Sequence[Group], left_out: int) -> Result:
    """What one model came to, as result.json holds it."""
    summary = heldout.summarise(t for g in groups for t in g.members)
    return {
        "ref": ref,
        "tasks": len(groups),
        "attempts": summary.n,
        "success": summary.success,
        "reward": summary.reward,
        "errors": summary.errors,
        "truncated_share": summary.truncated,
        "metrics": summary.metrics,
        "left_out": left_out,
    }


def _curves(groups: Sequence[Group]) -> dict[str, float]:
    return heldout.summarise(t for g in groups for t in g.members).curves()


def _line(result: Result) -> str:
    value = result["success"] if result["success"] is not None else result["reward"]
    kind = "success" if result["success"] is not None else "reward"
    measured = f"{kind} {value:.3f} over {result['tasks']} tasks"
    if not result["errors"]:
        return measured
    count = "not solved" if kind == "success" else "reward 0"
    failed = f"{result['errors']} of {result['attempts']} scores failed (they count as {count})"
    return f"{failed}, {measured}"
