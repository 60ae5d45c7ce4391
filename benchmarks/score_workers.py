"""A slow reward, scored by 1 and by 8 processes: GRPO with 128 completions a step.

    .venv/bin/python benchmarks/score_workers.py [--workers 1 8] [--steps 2] [--kill]

The score sleeps half a second, so that busy cores hardly matter: with W workers a step spends
128 x 0.5 / W seconds on rewards at best. With --kill an env process is killed every two seconds;
every completion must be scored all the same, or be counted in reward_errors. One JSON line per run.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from loops import BASE, go, make_run, metrics, push

from engine.home.run_dir import Home
from envs.host.process import EnvProcess

SCORE_S, PROMPTS, GROUP = 0.5, 16, 8
ENV = f"""
import time
from envs import Score, SingleTurnEnv, Task

class Slow(SingleTurnEnv):
    def tasks(self):
        return [Task(str(n), f"What is {{n}} + 1?", answer=str(n + 1)) for n in range(60)]
    def score(self, task, completion):
        time.sleep({SCORE_S})
        return Score(float(len(completion) % 3))

def load_environment():
    return Slow()
"""
SETTINGS = {
    "prompts_per_step": PROMPTS,
    "group_size": GROUP,
    "max_tokens": 4,
    "eval_rows": 2,
    "eval_every": 100,
    "save_every": 100,
    "skill_rows": 0,
    "keep": 0.0,
}


def measure(home: Home, env_id: str, workers: int, steps: int) -> dict[str, object]:
    """The seconds of a run's steps that nothing but the reward took, against the ideal."""
    settings = BASE["grpo"] | SETTINGS | {"steps": steps, "score_workers": workers}
    run = make_run(home, env_id, "grpo", settings, run_id=f"slow-{workers}")
    go(run)
    lines = metrics(run)[1:]
    ideal = PROMPTS * GROUP * SCORE_S / workers
    rewards = [line["reward_s"] for line in lines]
    return {
        "workers": workers,
        "ideal_s": ideal,
        "reward_s": [round(seconds, 2) for seconds in rewards],
        "times_ideal": [round(seconds / ideal, 2) for seconds in rewards],
        "sample_s": [round(line["sample_s"], 2) for line in lines],
        "reward_errors": [line["reward_errors"] for line in lines],
        "rollouts": [
            sum(1 for _ in (run.path / "rollouts" / f"step_{step:06d}.jsonl").open())
            for step in range(1, steps + 1)
        ],
    }


def kill_at_random(done: threading.Event, killed: list[int]) -> None:
    """Kill one env process every two seconds until `done`."""
    teams: list[EnvProcess] = []
    team = EnvProcess.team

    def watched(self: EnvProcess, count: int) -> list[EnvProcess]:
        teams[:] = team(self, count)
        return list(teams)

    EnvProcess.team = watched
    rng = random.Random(0)
    while not done.wait(2.0):
        pids = [process.pid for process in teams if process.pid]
        if pids:
            pid = rng.choice(pids)
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Home.locate(Path(place) / "home")
        env_id = push(home, Path(place) / "slow", ENV, name="slow")
        done, killed = threading.Event(), list[int]()
        if arguments.kill:
            threading.Thread(target=kill_at_random, args=(done, killed), daemon=True).start()
        for workers in arguments.workers:
            result = measure(home, env_id, workers, arguments.steps)
            print(json.dumps(result | {"killed": len(killed)}), flush=True)
        done.set()


if __name__ == "__main__":
    main()
