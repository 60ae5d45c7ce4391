"""Fixtures for tests of the engine: runs whose trainer is a torch-free script."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_configs import evaluate_config, train_config
from stand_ins import stand_in

from engine.core.files import Appender, read_json, read_lines, write_json
from engine.home.rows import TERMINAL, NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.models import catalog


class Bench:
    """Makes runs, looks at them and waits for them."""

    def __init__(self, home: Home) -> None:
        self.home = home

    def queue(self, name: str = "arith-grpo", *, wall_limit_hours: float = 0, **settings) -> RunDir:
        """Queue a run of the fake trainer. `max_gpu_hours` and `expect` are the run's, the rest
        settings."""
        cap, expect = settings.pop("max_gpu_hours", 0.0), settings.pop("expect", "")
        env_dir = settings.pop("env_dir", "")

        def prepare(run_id: str) -> None:
            self.home.run(run_id).create()
            config = evaluate_config(run_id) if wall_limit_hours else train_config(run_id)
            config |= {
                "env_dir": str(env_dir),
                "fake_trainer": {"steps": 3, "save_every": 1} | settings,
            }
            if wall_limit_hours:
                config["wall_limit_hours"] = wall_limit_hours
            write_json(self.home.run(run_id).config, config)

        kind = ("evaluate", "evaluate") if wall_limit_hours else ("train", "grpo")
        new = NewRun(name, *kind, "arith@0123", "pebble", max_gpu_hours=cap, expect=expect)
        with Store(self.home) as store:
            return self.home.run(store.insert_run(new, prepare).run_id)

    def start(self, **settings: Any) -> RunDir:
        """Queue a run and start what is queued."""
        run = self.queue(**settings)
        launcher.start_queued(self.home)
        return run

    def row(self, run: RunDir) -> RunRow:
        with Store(self.home) as store:
            return store.get_run(run.id)

    def until(self, holds: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
        """Poll until `holds()` is true and return that; fails with `what` at the deadline."""
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds} s until {what}")
            time.sleep(0.01)
        return found

    def until_state(self, run: RunDir, *states: str) -> RunRow:
        self.until(
            lambda: (
                self.row(run).state in states
                and (self.row(run).state not in TERMINAL or not launcher.is_alive(run))
            ),
            f"{run.id} is {' or '.join(states)}; it is {self.row(run)}",
        )
        return self.row(run)

    def until_step(self, run: RunDir, step: int) -> None:
        """Until the trainer holds before `step + 1`."""
        self.until(
            lambda: (run.path / "holds").exists() and self.steps(run)[-1] == step,
            f"the trainer holds after step {step}",
        )

    def go(self, run: RunDir) -> None:
        """Let a trainer that holds go on."""
        (run.path / "go").touch()

    def pids(self, run: RunDir) -> tuple[int, int]:
        """Supervisor and trainer of the attempt that runs."""
        attempt = self.row(run).attempt

        def started() -> dict[str, Any] | None:
            found = read_json(run.started_record) if run.started_record.exists() else {}
            return found if found.get("attempt") == attempt else None

        record = self.until(started, f"attempt {attempt} of {run.id} starts")
        return record["supervisor_pid"], record["trainer_pid"]

    def steps(self, run: RunDir) -> list[int]:
        return [row["step"] for row in read_lines(run.metrics)[0]]

    def add_env(self, name: str, **facts: Any) -> str:
        return add_env(self.home, name, **facts)

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def kill_all_of(self, run: RunDir) -> None:
        """Kill supervisor and trainer, as a machine that goes down; returns with the lock free."""
        self.kill(*self.pids(run))
        self.until(lambda: not launcher.is_alive(run), "the lock is free")


@pytest.fixture
def bench(home: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    stand_in(monkeypatch, trainer=Path(__file__).with_name("fake_trainer.py"))
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "0.2")
    return Bench(home)


@pytest.fixture(scope="session")
def env_maker() -> Callable[..., str]:
    """`add_env`, for fixtures that live longer than one test."""
    return add_env


@pytest.fixture
def env(home: Home) -> str:
    """A pushed environment with 40 train and 20 held-out rows; its id."""
    return add_env(home, "sums")


_ENVIRONMENT = """
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "1 + 1?", answer="2")]

    def score(self, task, completion):
        return Score(reward=sum(c.isdigit() for c in completion) / 8, success="1" in completion)

def load_environment():
    return Sums()
"""


def add_env(home: Home, name: str, *, secrets: tuple[str, ...] = (), **audit: str) -> str:
    """Store an environment version as a push would, without starting its process."""
    folder = home.env(name, "0123456789ab")
    (folder / "source").mkdir(parents=True)
    (folder / "source" / "environment.py").write_text(_ENVIRONMENT)
    rows = {"train": 40, "heldout": 20}
    facts = {
        "name": name,
        "kind": "single",
        "scored": True,
        "tools": [],
        "rows": rows,
        "limits": {},
        "secrets": list(secrets),
    }
    write_json(folder / "env.json", facts)
    write_json(folder / "audit.json", {"verdict": "ok", "headline": "ok", **audit})
    with Appender(folder / "tasks.jsonl") as tasks:
        for split, count in rows.items():
            for index in range(count):
                prompt = [{"role": "user", "content": f"{split} {index} + 1?"}]
                answer = [{"role": "assistant", "content": str(index + 1)}]
                row = {"id": f"{split}-{index}", "prompt": prompt, "answer": answer}
                tasks.append(row | {"split": split, "metadata": {}, "gold": prompt + answer})
    with Store(home) as store:
        return store.add_env(name, "0123456789ab", kind="single", info={"rows": rows}).env_id


def add_checkpoint(home: Home, run_id: str, step: int) -> Path:
    """A complete checkpoint of a rank-1 adapter on pebble; the one of step 5 does nothing."""
    folder = home.run(run_id).checkpoint(step)
    folder.mkdir(parents=True)
    config = {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"], "peft_type": "LORA"}
    write_json(folder / "adapter_config.json", config)
    facts = catalog.resolve_model(home, "pebble").facts
    inputs, outputs = facts.projection_shapes("q_proj")[0]
    header, at = {}, 0
    for layer in range(facts.layers):
        for part, shape in (("lora_A", [1, inputs]), ("lora_B", [outputs, 1])):
            key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.{part}.weight"
            size = 4 * shape[0] * shape[1]
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    values = bytes(at) if step == 5 else b"\x3d" * at  # all 0, or all 0.046
    weights = len(text).to_bytes(8, "little") + text + values
    (folder / "adapter_model.safetensors").write_bytes(weights)
    write_json(folder / "MANIFEST.json", {"step": step})
    return folder


@pytest.fixture
def tuned(home: Home) -> str:
    """A finished training run of the built-in model, checkpoints 5 (best) and 10; its id."""

    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        base = {"ref": "pebble", "path": str(catalog.BUILTIN["pebble"])}
        write_json(home.run(run_id).config, train_config(run_id, algorithm="sft", base=base))
        for step in (5, 10):
            add_checkpoint(home, run_id, step)
        home.run(run_id).best.symlink_to("step_000005")

    with Store(home) as store:
        new = NewRun("sums-sft", "train", "sft", "sums@0123456789ab", "pebble")
        run_id = store.insert_run(new, prepare).run_id
        store.set_state(run_id, "preparing", only_from={"queued"})
        store.set_state(run_id, "running", only_from={"preparing"})
        store.set_state(run_id, "done", only_from={"running"}, verdict="better")
        return run_id
