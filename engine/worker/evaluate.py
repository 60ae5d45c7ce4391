"""Evaluation of any models on one environment, and the learnability probe.

Every model plays the same tasks under the same sampling; models that share a base are loaded once
and told apart by their adapters. One attempt is greedy; several sample at temperature 1.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel

from engine.evidence.verdict import run_verdict
from engine.files import Appender
from engine.worker import heldout
from engine.worker.checkpoint import require_base
from engine.worker.failures import WorkerFailure
from engine.worker.job import Job, require
from engine.worker.manifest import weight_hashes
from engine.worker.policy import TRAINED, read_adapter, set_adapter_state
from engine.worker.rollouts import Stage, fits
from engine.worker.trajectory import Group, Trajectory
from engine.worker.workbench import Workbench, environment, prepare, sampling, tasks_of

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
                results[index] = _result(model["ref"], groups, len(all_tasks) - len(tasks))
                job.event("evaluated", f"{model['ref']}: {_line(results[index])}", **results[index])
                job.metrics(len(results), {"model": model["ref"]} | _curves(groups))
    ordered = [results[i] for i in range(len(models))]
    summary = "; ".join(f"{r['ref']}: {_line(r)}" for r in ordered)
    evidence = run_verdict(job.run)
    return {
        "models": ordered,
        "verdict": evidence["verdict"],
        "evidence": evidence,
        "summary": summary,
    }


def probe(job: Job) -> dict[str, Any]:
    """Sample a few training tasks `group_size` times: is there anything for GRPO to select?

    Returns shares of groups with differing rewards, too easy and too hard; pass@k for k up to the
    group size; the share of completions cut at max_tokens.
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
    result = learnability(groups, group_size)
    job.metrics(1, {k: v for k, v in result.items() if isinstance(v, float)})
    return result | {"verdict": "unknown", "ref": model["ref"]}


def learnability(groups: Sequence[Group], group_size: int) -> dict[str, Any]:
    """What groups of sampled completions say about training on such tasks."""
    members = [t for g in groups for t in g.members]
    uniform = [g for g in groups if g.uniform]
    easy = sum(bool(g.scored) and all(succeeded(t) for t in g.scored) for g in uniform)
    solved = [(len(g.scored), sum(succeeded(t) for t in g.scored)) for g in groups]
    ks = [k for k in (1, 2, 4, 8, 16) if k <= group_size]
    summary = heldout.summarise(members)
    return {
        "tasks": len(groups),
        "samples_per_task": group_size,
        "effective": 1 - len(uniform) / len(groups),
        "too_easy": easy / len(groups),
        "too_hard": (len(uniform) - easy) / len(groups),
        "pass_at_k": {str(k): pass_at_k(solved, k) for k in ks},
        "solved_counts": [c for _, c in solved],
        "reward_mean": summary.reward,
        "truncated_share": summary.truncated,
        "error_share": summary.errors / max(1, len(members)),
        "summary": f"{1 - len(uniform) / len(groups):.0%} of {len(groups)} tasks have rewards "
        f"that differ within {group_size} samples",
    }


def pass_at_k(solved: Sequence[tuple[int, int]], k: int) -> float:
    """Mean over tasks of 1 - C(n - c, k) / C(n, k), unbiased for drawing k of n samples of which
    c are right (arXiv 2107.03374, equation 1). Tasks with fewer than k samples are left out."""
    usable = [(n, c) for n, c in solved if n >= k]
    if not usable:
        return 0.0
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in usable) / len(usable)


def succeeded(trajectory: Trajectory) -> bool:
    """Success where the environment says so, else a positive reward."""
    if trajectory.success is not None:
        return trajectory.success
    return trajectory.reward > 0


class adapter:
    """Inside, the bench's base carries an adapter (or none); afterwards it is bare again."""

    def __init__(self, bench: Workbench, folder: str | None, base_weights: dict[str, str]) -> None:
        self.bench = bench
        self.folder = Path(folder) if folder else None
        self.base_weights = base_weights
        self.wrapped: PeftModel | None = None

    def __enter__(self) -> None:
        if self.folder is None:
            return
        require_base(self.folder, self.base_weights)
        state = read_adapter(self.folder)
        config = LoraConfig.from_pretrained(str(self.folder))
        self.wrapped = PeftModel(self.bench.base.model, config, adapter_name=TRAINED)
        set_adapter_state(self.wrapped, state, TRAINED)
        self.wrapped.eval()

    def __exit__(self, *_: object) -> None:
        if self.wrapped is not None:
            self.wrapped.unload()


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
    return f"{kind} {value:.3f} over {result['tasks']} tasks"
