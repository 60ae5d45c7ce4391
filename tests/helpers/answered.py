"""Runs that have answered, written as a worker leaves them: for tests of what reads answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from run_configs import evaluate_config, train_config

from engine.core.files import Appender, write_json
from engine.environments import registry
from engine.environments.push import push_env
from engine.home.rows import NewRun
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store

Row = dict[str, Any]

SUMS = """
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    def tasks(self):
        return [
            Task(f"{a}+{b}", f"What is {a} + {b}?", answer=f"{a + b}",
                 split="heldout" if a == 9 else "train")
            for a in range(1, 10) for b in range(1, 10)
        ]

    def score(self, task, completion):
        right = completion == task.answer
        return Score(float(right), success=right, metrics={"short": float(len(completion) < 3)})

def load_environment():
    return Sums()
"""

# A game of several turns; REPLY is what it says to a wrong guess.
GUESS = """
from envs import Message, MultiTurnEnv, Score, Task

class Guess(MultiTurnEnv):
    def tasks(self):
        return [Task(f"g{n}", f"Guess {n}.", split="train" if n else "heldout") for n in range(4)]

    def start(self, task):
        return {"said": [], "wanted": task.id[1:]}

    def step(self, state, completion):
        state["said"].append(completion.content)
        return None if completion.content == state["wanted"] else [Message("user", "REPLY")]

    def score(self, task, state):
        return Score(1.0 / len(state["said"]), success=state["said"][-1] == state["wanted"])

def load_environment():
    return Guess()
"""


def push(home: Home, folder: Path, source: str = SUMS, name: str = "sums") -> str:
    """Push a one-file environment; its id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.py").write_text(source)
    return push_env(home, str(folder), name=name, roots=[folder]).env_id


def answer(task: str, said: str, reward: float, attempt: int = 0, **more: Any) -> Row:
    """One stored answer to a sum."""
    return {
        "task": task,
        "half": "report",
        "attempt": attempt,
        "prompt": [{"role": "user", "content": f"What is {task.replace('+', ' + ')}?"}],
        "messages": [{"role": "assistant", "content": said}],
        "completion": said,
        "reward": reward,
        "success": reward >= 1.0,
        "metrics": {"short": float(len(said) < 3)},
        "error": None,
        "stop_reason": "stop",
        "tokens": len(said) + 1,
    } | more


def evaluation(
    home: Home, env_id: str, answers: Mapping[str, Sequence[Row]], *, attempts: int = 2
) -> RunDir:
    """A finished evaluation of the models of `answers`."""
    models = [{"ref": ref, "base_path": "/", "adapter": None} for ref in answers]
    settings = {"temperature": 1.0, "max_tokens": 16, "top_p": 1.0, "stop": []}
    content = {"models": models, "attempts": attempts, "settings": settings, "split": "train"}
    run = _run(home, env_id, "evaluate", "evaluate", ", ".join(answers), content)
    for at, (ref, rows) in enumerate(answers.items()):
        _write(run.model_evals(at), [{"model": ref} | row for row in rows])
    _finish(home, run)
    return run


def training(
    home: Home,
    env_id: str,
    *,
    model: str = "pebble",
    algorithm: str = "grpo",
    rollouts: Mapping[int, Sequence[Row]] | None = None,
    evals: Mapping[int, Sequence[Row]] | None = None,
) -> RunDir:
    """A finished training run with rollouts and held-out answers by step."""
    settings = {"group_size": 2, "max_tokens": 16} if algorithm == "grpo" else {}
    content = {"model": model, "settings": settings}
    run = _run(home, env_id, "train", algorithm, model, content)
    for step, rows in (rollouts or {}).items():
        _write(run.rollouts(step), [{"step": step} | row for row in rows])
    for step, rows in (evals or {}).items():
        _write(run.evals(step), [{"model": run.id} | row for row in rows])
    _finish(home, run)
    return run


def _run(home: Home, env_id: str, kind: str, algorithm: str, model: str, content: Row) -> RunDir:
    record = registry.find_env(home, env_id)
    common = {"kind": kind, "algorithm": algorithm, "env_id": env_id, "env_dir": str(record.dir)}

    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        make = train_config if kind == "train" else evaluate_config
        write_json(home.run(run_id).config, make(run_id, **common, **content))

    with Store(home) as store:
        new = NewRun(f"{record.name}-{algorithm}", kind, algorithm, env_id, model)
        run_id = store.insert_run(new, prepare).run_id
        store.set_state(run_id, "preparing", only_from={"queued"})
        store.set_state(run_id, "running", only_from={"preparing"})
    return home.run(run_id)


def _finish(home: Home, run: RunDir) -> None:
    with Store(home) as store:
        store.set_state(run.id, "done", only_from={"running"}, verdict="unknown")


def _write(path: Path, rows: Sequence[Row]) -> None:
    with Appender(path) as file:
        for row in rows:
            file.append(row)
