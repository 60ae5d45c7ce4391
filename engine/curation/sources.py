"""Answers that runs left: attempts to curate from, files of rows to score again."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.core.hints import Call, Hint
from engine.curation.selection import Attempt
from engine.environments import registry
from engine.environments.registry import EnvRecord
from engine.evidence.stats.results import load_rows
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.run_config import GRPOConfig, ProbeConfig, RunConfig, TrainConfig

MOST_SOURCES = 32
MOST_STEPS = 8  # of a training run, whose answers are scored again at once


@dataclass(frozen=True)
class Source:
    """One run with its attempts, its environment version and the files they were read from."""

    ref: str
    row: RunRow
    record: EnvRecord
    attempts: list[Attempt]
    files: dict[str, str]
    config: RunConfig

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(attempt.model for attempt in self.attempts))

    def about(self) -> dict[str, Any]:
        """The source in an answer, and in the card of what was made of it."""
        row = self.row
        return {
            "id": self.ref,
            "kind": row.algorithm if row.kind == "train" else row.kind,
            "env_id": self.record.env_id,
            "models": self.models,
            "attempts": len(self.attempts),
        }


def load_sources(home: Home, source_ids: Sequence[str]) -> list[Source]:
    """The runs behind `source_ids`, each with its attempts.

    Raises UserError BAD_ARGUMENT, RUN_NOT_FOUND, NO_EVALUATION or ENV_NOT_FOUND.
    """
    refs = list(dict.fromkeys(str(ref).strip() for ref in source_ids if str(ref).strip()))
    if not 1 <= len(refs) <= MOST_SOURCES:
        raise UserError(
            "BAD_ARGUMENT",
            f"{len(refs)} sources were given",
            hint=f"Name 1 to {MOST_SOURCES} evaluations or GRPO runs.",
            field="source_ids",
        )
    found = []
    for ref in refs:
        run_id, _, which = ref.partition("@")
        with Store(home) as store:
            row = store.get_run(run_id)
        found.append(_source(home, ref, row, which))
    doubled = [s.ref for s in found if sum(o.row.run_id == s.row.run_id for o in found) > 1]
    if any("@" not in ref for ref in doubled):
        raise UserError(
            "BAD_ARGUMENT",
            f"{', '.join(doubled)} name the same rollouts twice",
            hint="Name a run once, or only single steps of it.",
            field="source_ids",
        )
    return found


def _source(home: Home, ref: str, row: RunRow, which: str) -> Source:
    run = home.run(row.run_id)
    config = run.read_config()
    parts = _training_parts(run, row, which) if row.kind == "train" else None
    if parts is None:
        if which:
            raise UserError(
                "BAD_ARGUMENT",
                f"{ref}: only the rollouts of a training run have steps",
                hint=f"Name {row.run_id}.",
                field="source_ids",
            )
        parts = [(run.model_evals(at), model, 0) for at, model in enumerate(config.model_refs)]
    attempts: list[Attempt] = []
    files: dict[str, str] = {}
    for path, model, step in parts:
        rows = load_rows(path)
        if rows:
            attempts += [_attempt(row, model, step, at, line) for at, line in enumerate(rows)]
            files[str(path.relative_to(run.path))] = hashlib.sha256(path.read_bytes()).hexdigest()
    if not attempts:
        raise UserError(
            "NO_EVALUATION",
            f"{ref} has no rollouts to choose from (it is {row.state})",
            hint=_play_first(row),
            field="source_ids",
        )
    return Source(ref, row, registry.find_env(home, row.env_id), attempts, files, config)


def _play_first(row: RunRow) -> Hint:
    """How a run without rollouts comes to have some."""
    if row.kind != "train":
        return Hint("Wait until it has some:", Call("wait_run", {"run_id": row.run_id}))
    plays = {"env_id": row.env_id, "models": [row.run_id], "split": "train", "attempts": 8}
    return Hint(
        "Name an evaluation or a GRPO run that has played. SFT plays no training tasks; to play:",
        Call("evaluate", plays),
    )


def _training_parts(run: RunDir, row: RunRow, which: str) -> list[tuple[Path, str, int]]:
    steps = run.rollout_steps()
    if which:
        number = which.removeprefix("step")
        if not number.isdecimal() or int(number) not in steps:
            said = f"steps {steps[0]} to {steps[-1]}" if steps else "no rollouts"
            raise UserError(
                "BAD_ARGUMENT",
                f"{row.run_id} has no rollouts of {which}",
                hint=f"It has {said}; write {row.run_id}@step{steps[-1] if steps else 'N'}.",
                field="source_ids",
            )
        steps = [int(number)]
    return [(run.rollouts(step), row.run_id, step) for step in steps]


def _attempt(run: RunRow, model: str, step: int, at: int, line: Mapping[str, Any]) -> Attempt:
    messages = line.get("messages")
    if not messages:
        messages = [{"role": "assistant", "content": str(line.get("completion") or "")}]
    return Attempt(
        source=run.run_id,
        env_id=run.env_id,
        task=str(line.get("task")),
        model=model,
        step=step,
        member=int(line.get("attempt", line.get("member", at)) or 0),
        prompt=line.get("prompt") or [],
        messages=messages,
        reward=float(line.get("reward") or 0.0),
        success=line.get("success"),
        tokens=int(line.get("tokens") or 0),
        stop_reason=str(line.get("stop_reason") or "stop"),
        error=line.get("error"),
        metrics=line.get("metrics") or {},
    )


@dataclass(frozen=True)
class Stored:
    """The answers of a run that can be scored again.

    Attributes:
        models: (reference, file of rows within the run's folder).
        tasks: different tasks among them.
        attempts: at each task; 1 was greedy.
        sampling: how they were sampled.
    """

    run_id: str
    env_id: str
    models: list[tuple[str, str]]
    tasks: int
    attempts: int
    sampling: dict[str, Any]
    warnings: list[str]


def stored_answers(home: Home, run_id: str, split: str = "heldout") -> Stored:
    """What `evaluate(regrade=run_id)` scores again.

    Of an evaluation or probe all its models. Of a training run its held-out answers at up to eight
    steps, the start, the best and the last among them; with `split="train"` its rollouts.
    Raises UserError RUN_NOT_FOUND, RUN_STATE or NO_EVALUATION.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    config = run.read_config()
    if row.kind != "train" and row.state not in TERMINAL:
        raise UserError(
            "RUN_STATE",
            f"{row.run_id} is {row.state}: its answers are not complete",
            hint=Hint("Wait for it, then regrade.", Call("wait_run", {"run_id": row.run_id})),
            field="regrade",
            retryable=True,
        )
    settings, attempts, warnings = config.settings, 1, []
    sampling = settings if isinstance(settings, dict) else settings.model_dump()
    if not isinstance(config, TrainConfig):
        files = [(model, run.model_evals(at)) for at, model in enumerate(config.model_refs)]
        attempts = (
            config.settings.group_size if isinstance(config, ProbeConfig) else config.attempts
        )
    elif split == "train":
        steps = _some(run.rollout_steps(), None)
        files = [(f"{row.run_id}, rollouts of step {step}", run.rollouts(step)) for step in steps]
        attempts = config.settings.group_size if isinstance(config, GRPOConfig) else 1
    else:
        best = run.resolve_checkpoint("best")
        steps = _some(run.eval_steps(), int(best.name.rpartition("_")[2]) if best else None)
        start = config.model
        files = [(f"{row.run_id}@step{step}" if step else start, run.evals(step)) for step in steps]
        sampling |= _exam_sampling(run)
        left = len(run.eval_steps()) - len(steps)
        if left:
            warnings.append(f"{left} of the evaluated steps are left out; at most {MOST_STEPS} are")
    rows = {ref: load_rows(path) for ref, path in files}
    models = [(ref, str(path.relative_to(run.path))) for ref, path in files if rows[ref]]
    said = [line for found in rows.values() for line in found if "reward" in line]
    if not said:
        raise UserError(
            "NO_EVALUATION",
            f"{row.run_id} has no stored answers to score again (it is {row.state})",
            hint="Name an evaluation, or a run whose environment scores.",
            field="regrade",
        )
    return Stored(
        row.run_id,
        row.env_id,
        models,
        len({str(line.get("task")) for line in said}),
        attempts,
        sampling,
        warnings,
    )


def _some(steps: Sequence[int], best: int | None) -> list[int]:
    """At most eight steps spread over all, the first, the last and the best among them."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    wanted = {steps[0], steps[-1], *([best] if best in steps else [])}
    room = MOST_STEPS - len(wanted)
    others = [step for step in steps if step not in wanted]
    spread = {others[round((at + 1) * (len(others) - 1) / (room + 1))] for at in range(room)}
    return sorted(wanted | spread)


def _exam_sampling(run: RunDir) -> dict[str, Any]:
    return dict(read_object(run.manifest).get("eval_sampling") or {})
