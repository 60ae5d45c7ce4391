"""Run folders as a worker leaves them, written through engine.home.run_dir without a model."""

import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from run_configs import evaluate_config, train_config

from engine.core.files import write_json, write_text
from engine.home.rows import NewRun
from engine.home.run_dir import CHECKPOINT_MANIFEST, Home, RunDir
from engine.home.store import Store
from tests.helpers.env_versions import write_version

# A loaded machine is no failure, and forty examples find what a hundred do.
settings.register_profile("steady", deadline=None, max_examples=40)
settings.load_profile("steady")

ENV_ID = "arith@0123456789ab"
Row = dict[str, Any]


@dataclass
class SyntheticRun:
    """One run folder with its row in the store; methods add files."""

    home: Home
    run: RunDir
    config: dict[str, Any]
    started: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return self.run.id

    def running(self) -> "SyntheticRun":
        with Store(self.home) as store:
            store.set_state(self.id, "running", only_from={"preparing"}, started=self.started)
        return self

    def finish(self, state: str = "done", **values: Any) -> "SyntheticRun":
        """Walk the row to its final state."""
        self.running()
        values = {"ended": self.started + 90.0, "spent_hours": 0.025} | values
        with Store(self.home) as store:
            if state == "cancelled":
                store.set_state(self.id, "stopping", only_from={"running"})
            assert store.set_state(
                self.id,
                state,
                only_from={"stopping" if state == "cancelled" else "running"},
                **values,
            )
        return self

    def metrics(self, rows: Iterable[Row]) -> "SyntheticRun":
        return self._append(
            self.run.metrics,
            ({"step": row["step"], "time": self.started + row["step"], **row} for row in rows),
        )

    def events(self, *rows: Row) -> "SyntheticRun":
        return self._append(self.run.events, ({"time": self.started, **row} for row in rows))

    def log(self, text: str, attempt: int = 1) -> "SyntheticRun":
        self.run.log(attempt).write_text(text, "utf-8")
        return self

    def checkpoint(self, step: int, best: bool = False) -> "SyntheticRun":
        folder = self.run.checkpoint(step)
        folder.mkdir(parents=True)
        write_json(folder / CHECKPOINT_MANIFEST, {"step": step}, fsync=False)
        if best:
            self.run.best.unlink(missing_ok=True)
            self.run.best.symlink_to(folder.name)
        return self

    def evals(self, step: int, rows: Iterable[Row]) -> "SyntheticRun":
        return self._append(self.run.evals(step), (row | {"model": self.id} for row in rows))

    def model_evals(self, index: int, rows: Iterable[Row]) -> "SyntheticRun":
        ref = self.config["models"][index]["ref"]
        return self._append(self.run.model_evals(index), (row | {"model": ref} for row in rows))

    def rollouts(self, step: int, rows: Iterable[Row]) -> "SyntheticRun":
        return self._append(self.run.rollouts(step), (row | {"step": step} for row in rows))

    def _append(self, path: Path, rows: Iterable[Row]) -> "SyntheticRun":
        text = "".join(
            json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows
        )
        with path.open("a", encoding="utf-8") as file:
            file.write(text.replace(":NaN", ":null"))  # as engine.core.files.Appender writes it
        return self


def eval_row(
    task: str, success: bool | None, *, half: str = "report", attempt: int = 0, **more: Any
) -> Row:
    """One evaluation row; right answers say 42, wrong ones 41."""
    said = "42" if success else "41"
    row = {
        "model": "pebble",
        "task": task,
        "half": half,
        "attempt": attempt,
        "prompt": [{"role": "user", "content": f"What is {task}?"}],
        "messages": [{"role": "assistant", "content": said}],
        "completion": said,
        "reward": float(bool(success)),
        "success": success,
        "metrics": {"format": 1.0},
        "error": None,
        "stop_reason": "stop",
        "tokens": 2,
    }
    return row | more


def halved(solved: Callable[[int], bool], n: int, **more: Any) -> list[Row]:
    """`n` tasks t0.. alternating between the halves, solved where `solved(i)`."""
    return [
        eval_row(f"t{i}", solved(i), half="report" if i % 2 else "select", **more) for i in range(n)
    ]


def rollout_row(group: int, member: int, reward: float, **more: Any) -> Row:
    row = {
        "task": f"t{group}",
        "group": group,
        "member": member,
        "prompt": [{"role": "user", "content": f"What is {group} + {group}?"}],
        "messages": [{"role": "assistant", "content": f"It is {2 * group}."}],
        "completion": f"It is {2 * group}.",
        "reward": reward,
        "success": reward >= 1.0,
        "metrics": {"format": 1.0 - member / 10},
        "error": None,
        "advantage": round(reward - 0.5, 3),
        "stop_reason": "stop",
        "tokens": 4 + member,
        "turns": 1,
        "prompt_ids": [1, 2, 3],
        "ids": [7, 8, 9, 10 + member],
        "loss_mask": [1, 1, 1, 1],
    }
    return row | more


def curve(step: int, total: int, rng: random.Random) -> Row:
    """One line of a GRPO run that learns."""
    rise = 1 / (1 + math.exp(6 - 12 * step / total))
    return {
        "step": step,
        "reward_mean": 0.15 + 0.6 * rise + rng.gauss(0, 0.03),
        "reward_std": 0.35 - 0.1 * rise,
        "length_mean": 9 - 3 * rise + rng.gauss(0, 0.2),
        "length_p95": 16 - 5 * rise,
        "truncated_share": max(0.0, 0.08 - 0.08 * rise),
        "entropy": 1.2 - 0.7 * rise + rng.gauss(0, 0.02),
        "kl": 0.05 * rise,
        "clip_share": 0.02,
        "zero_advantage_share": 0.2 + 0.2 * rise,
        "groups_effective": 0.8 - 0.2 * rise,
        "groups_too_easy": 0.4 * rise,
        "groups_too_hard": 0.15 * (1 - rise),
        "groups_flat_partial": 0.05 * (1 - rise),
        "reward_errors": 0.0,
        "grad_norm": 0.8 + rng.gauss(0, 0.1),
        "lr": 1e-3 * (1 - step / total),
        "sample_s": 0.5,
        "reward_s": 0.1,
        "train_s": 0.7,
        "tokens_per_s": 900 + rng.gauss(0, 30),
        "format": 0.9 + 0.1 * rise,
    }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home in memory where the machine has such a folder.

    Nothing here is about durability, and a busy disk makes every synced row slow.
    """
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="honesmith-", dir=where) as folder:
        monkeypatch.setenv("HONESMITH_HOME", folder)
        yield Home.locate()


@pytest.fixture
def make_run(home: Home) -> Callable[..., SyntheticRun]:
    """make_run(algorithm="grpo", env_id=..., settings={...}, **config) -> a leased run."""

    def make(
        algorithm: str = "grpo",
        *,
        env_id: str = ENV_ID,
        model: str = "pebble",
        kind: str = "train",
        settings: dict[str, Any] | None = None,
        **config: Any,
    ) -> SyntheticRun:
        name, _, hash12 = env_id.partition("@")
        new = NewRun(
            name=f"{name}-{'eval' if kind == 'evaluate' else algorithm}",
            kind=kind,
            algorithm=algorithm,
            env_id=env_id,
            model=model,
            parent=config.get("parent", ""),
        )
        with Store(home) as store:
            row = store.insert_run(new)
            store.lease_next([f"device-{row.rowid}"])
        run = home.run(row.run_id)
        run.create()
        whole = {
            "env_id": env_id,
            "env_dir": str(home.env(name, hash12)),
            "settings": settings or {},
        } | config
        if kind == "train":
            whole |= {"algorithm": algorithm, "model": model}
            full = train_config(row.run_id, **whole)
        else:
            full = evaluate_config(row.run_id, **whole)
        write_json(run.config, full, fsync=False)
        return SyntheticRun(home, run, full)

    return make


@pytest.fixture
def rows() -> Any:
    """The row makers above: rows.eval, rows.halved, rows.rollout, rows.curve."""
    return SimpleNamespace(eval=eval_row, halved=halved, rollout=rollout_row, curve=curve)


@pytest.fixture
def learned_run(make_run: Callable[..., SyntheticRun], home: Home) -> SyntheticRun:
    """A finished GRPO run of 60 steps that lifts held-out success from 35 % to about 70 %."""
    rng = random.Random(5)
    total, tasks = 60, 240
    run = make_run(
        settings={"learning_rate": 1e-3, "steps": total, "group_size": 8, "lora_rank": 16},
        sources={
            "learning_rate": "user",
            "steps": "user",
            "group_size": "recipe",
            "lora_rank": "model",
        },
        note="Does GRPO alone teach two-digit sums?",
        expect="better",
    )
    write_env(home, run.config)
    hard = {i: rng.random() for i in range(tasks)}
    at = {0: 0.35, 20: 0.45, 40: 0.68, 60: 0.62}
    lines = [curve(step, total, rng) for step in range(total + 1)]
    for step, level in at.items():
        lines[step] |= {"heldout_success": level, "heldout_reward": level}
    lines[0] = {"step": 0, "heldout_success": 0.35, "heldout_reward": 0.35}
    run.metrics(lines)
    for step, level in at.items():
        solved = [hard[i] + rng.gauss(0, 0.05) < level for i in range(tasks)]
        both = step in (0, 40)  # the report half is played at the start and with the best
        run.evals(
            step,
            [
                row
                for row in halved(lambda i, s=solved: s[i], tasks)
                if both or row["half"] == "select"
            ],
        )
        if step:
            run.checkpoint(step, best=step == 40)
    for step in (1, 30, 60):
        run.rollouts(
            step,
            [
                rollout_row(g, m, rng.choice([0.0, 0.0, 0.5, 1.0]))
                for g in range(4)
                for m in range(8)
            ],
        )
    run.events(
        {"event": "started", "message": "60 steps", "total_steps": total},
        {"event": "evaluated", "message": "step 20", "step": 20, "heldout_success": 0.45},
        {"event": "alert", "id": "entropy", "message": "entropy fell below 30 % of its start"},
        {"event": "finished", "message": "done"},
    )
    run.log("loading\n" + "".join(f"step {i} of {total}\n" for i in range(1, total + 1)))
    write_json(run.run.manifest, manifest(run), fsync=False)
    return run.finish(verdict="better")


def manifest(run: SyntheticRun) -> dict[str, Any]:
    return {
        "run_id": run.id,
        "time": run.started,
        "env": {"env_id": run.config["env_id"], "tasks_sha256": "feed" * 16},
        "model": {
            "ref": "pebble",
            "files": {"model.safetensors": "beef" * 16, "config.json": "cafe" * 16},
            "start_adapter": None,
        },
        "settings_sha256": "abcd" * 16,
        "seed": 17,
        "versions": {"python": "3.11.7", "torch": "2.11.0", "honesmith": "0.1.0"},
        "hardware": {"device": "cpu", "threads": 2, "machine": "x86_64", "cores": 2},
        "precision": "float32",
    }


def write_env(home: Home, config: dict[str, Any]) -> None:
    """An environment version folder as push_env leaves it."""
    name, _, hash12 = config["env_id"].partition("@")
    folder = home.env(name, hash12)
    folder.mkdir(parents=True, exist_ok=True)
    write_version(
        folder / "env.json",
        name=name,
        hash=hash12,
        env_id=config["env_id"],
        rows={"train": 1000, "heldout": 240},
        secrets=("ARITH_KEY",),
    )
    write_text(folder / "tasks.jsonl", "", fsync=False)
