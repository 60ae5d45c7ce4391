"""Evaluation of any models on one environment, and the learnability probe.

Every model plays the same tasks under the same sampling; models that share a base are loaded once
and told apart by their adapters. One attempt is greedy; several sample at temperature 1.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from engine.core.files import Appender
from engine.evidence.stats.learnability import Sample, learnability
from engine.evidence.verdict.verdict import run_verdict
from engine.runs import stored_answers
from engine.worker.components import Workbench, environment, prepare, sampling, tasks_of
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job, require
from engine.worker.core.trajectory import Group
from engine.worker.evaluation import heldout
from engine.worker.manifest import weight_hashes
from engine.worker.network.adapter import LoraSpec, read_adapter
from engine.worker.rollouts.collect import Stage, fits
from engine.worker.update.checkpoint import require_base

# Tasks played between two looks at the stop flag: a cancelled evaluation ends within seconds.
SLICE = 256


def evaluate(job: Job) -> dict[str, Any]:
    """Play the tasks with every model; returns a summary per model.

    Raises:
        WorkerFailure: kind config or data.
        Stopped: when asked to stop; rows written so far stay.
    """
    config, settings = job.config, job.settings
    attempts = config["attempts"]
    models = config["models"]
    results: dict[int, dict[str, Any]] = {}
    job.event("started", f"{len(models)} models", total_steps=len(models))
    for base_path in dict.fromkeys(model["base_path"] for model in models):
        bench = prepare(job, Path(base_path), settings)
        with environment(bench, job) as process:
            if process is None:
                raise WorkerFailure("config", "This environment scores nothing to evaluate.")
            weights = weight_hashes(job.run.home, bench.base.path)
            stage = bench.stage(process, settings)
            params = sampling(settings, greedy=attempts == 1, seed=settings["seed"])
            all_tasks = heldout.ordered(tasks_of(bench, config["split"]), config["rows"])
            half = heldout.halves(all_tasks)
            tasks = [t for t in all_tasks if fits(t, stage, params)]
            require(tasks, f"{config['split']} tasks that fit into max_length", "Raise max_length.")
            for index, model in enumerate(models):
                if model["base_path"] != base_path:
                    continue
                with adapter(bench, model["adapter"], weights):
                    groups = _play(job, index, model["ref"], tasks, half, stage, bench, attempts)
                if len(results) + 1 == len(models):
                    # Of the last model alone: by now the environment has scored all the others.
                    with _rescoring(job, bench) as begin:
                        begin(job.run.model_evals(index), "", {task["id"]: task for task in tasks})
                results[index] = _result(model["ref"], groups, len(all_tasks) - len(tasks))
                job.event("evaluated", f"{model['ref']}: {_line(results[index])}", **results[index])
                job.metrics(len(results), {"model": model["ref"]} | _curves(groups))
    ordered = [results[i] for i in range(len(models))]
    summary = "; ".join(f"{r['ref']}: {_line(r)}" for r in ordered)
    evidence = run_verdict(job.run).to_json()
    return {
        "models": ordered,
        "verdict": evidence["verdict"],
        "evidence": evidence,
        "summary": summary,
    }


def probe(job: Job) -> dict[str, Any]:
    """Sample a few training tasks `group_size` times: is there anything for GRPO to select?

    Returns what engine/evidence/stats/learnability.py makes of the samples.
    """
    config, settings = job.config, job.settings
    model = config["models"][0]
    bench = prepare(job, Path(model["base_path"]), settings)
    group_size = settings["group_size"]
    job.event("started", "probe", total_steps=1)
    with environment(bench, job) as process:
        if process is None:
            raise WorkerFailure("config", "This environment scores nothing to probe.")
        stage = bench.stage(process, settings)
        params = sampling(settings, greedy=False, seed=settings["seed"])
        pool = [t for t in tasks_of(bench, "train") if fits(t, stage, params)]
        tasks = heldout.ordered(pool, config["samples"])
        require(tasks, "training tasks that fit into max_length", "Raise max_length.")
        weights = weight_hashes(job.run.home, bench.base.path)
        with adapter(bench, model["adapter"], weights):
            groups = heldout.evaluate(tasks, stage, bench.sampler, params, group_size)
    job.run.model_evals(0).parent.mkdir(parents=True, exist_ok=True)
    with Appender(job.run.model_evals(0)) as file:
        heldout.write_rows(file, groups, {}, model["ref"])
    result = learnability(samples_of(groups), group_size, settings["max_tokens"])
    job.metrics(1, {k: v for k, v in result.items() if isinstance(v, float)})
    return result | {"verdict": "unknown", "ref": model["ref"]}


def samples_of(groups: Sequence[Group]) -> list[list[Sample]]:
    """Groups as the probe judges them."""
    return [
        [
            Sample(
                reward=t.reward,
                success=t.success,
                error=t.error is not None,
                tokens=t.trained_tokens,
                cut=t.stop_reason in ("length", "max_turns"),
                said=t.completion,
            )
            for t in group.members
        ]
        for group in groups
    ]


@contextmanager
def adapter(bench: Workbench, folder: str | None, base_weights: dict[str, str]) -> Iterator[None]:
    """Inside, the sampler carries the adapter in `folder` (or none); afterwards it is dropped."""
    if folder is None:
        bench.sampler.load(None)
        yield
        return
    network = bench.base.network
    require_base(Path(folder), base_weights)
    made = network.new_adapter(LoraSpec.from_folder(Path(folder)), seed=0)
    try:
        made.load(read_adapter(Path(folder)))
        bench.sampler.load(made)
        yield
    finally:
        bench.sampler.load(None)
        network.drop_adapter(made)


def _play(
    job: Job,
    index: int,
    ref: str,
    tasks: list[dict[str, Any]],
    half: dict[str, str],
    stage: Stage,
    bench: Workbench,
    attempts: int,
) -> list[Group]:
    params = sampling(job.settings, greedy=attempts == 1, seed=job.settings["seed"])
    path = job.run.model_evals(index)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    groups: list[Group] = []
    with Appender(path) as file:
        for start in range(0, len(tasks), SLICE):
            job.check_stop()
            part = heldout.evaluate(
                tasks[start : start + SLICE], stage, bench.sampler, params, attempts
            )
            heldout.write_rows(file, part, half, ref)
            groups += part
    return groups


def _rescoring(job: Job, bench: Workbench) -> AbstractContextManager[stored_answers.Begin]:
    return stored_answers.beside(job.run, bench.env, lambda why: job.event("rescore_skipped", why))


def _result(ref: str, groups: Sequence[Group], left_out: int) -> dict[str, Any]:
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


def _line(result: dict[str, Any]) -> str:
    value = result["success"] if result["success"] is not None else result["reward"]
    kind = "success" if result["success"] is not None else "reward"
    said = f"{kind} {value:.3f} over {result['tasks']} tasks"
    if not result["errors"]:
        return said
    count = "not solved" if kind == "success" else "reward 0"
    failed = f"{result['errors']} of {result['attempts']} scores failed (they count as {count})"
    return f"{failed}, {said}"
