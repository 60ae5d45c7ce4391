"""Short runs in several processes, on pebble."""

import contextlib
from typing import Any

import psutil
from loops import BASE, make_run

from engine.home.run_dir import Home, RunDir

# Every rank has an adapter of its own, and all of them the same gradient but for rounding.
CLOSE = {"rel": 1e-5, "abs": 1e-5}

# What keeps a run short: two steps, and few and short answers.
SHORT = {"steps": 2, "eval_every": 2, "save_every": 2, "eval_rows": 4, "skill_rows": 0}
SAMPLED = {"prompts_per_step": 4, "group_size": 3, "max_tokens": 12}


def run_of(
    home: Home, env_id: str, algorithm: str, ranks: int, run_id: str = "", **changes: Any
) -> RunDir:
    settings = BASE[algorithm] | SHORT | (SAMPLED if algorithm in ("grpo", "distill") else {})
    settings |= {"gpus": ranks} | changes
    run_id = run_id or f"sums-{algorithm}-{ranks}"
    return make_run(home, env_id, algorithm, settings, run_id=run_id)


def helpers() -> list[psutil.Process]:
    """The other ranks that live below this process."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            command = process.cmdline()
            if "engine.worker.helper" in command or any(a.endswith("/rank.py") for a in command):
                living.append(process)
    return living
