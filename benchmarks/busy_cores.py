"""Two-thread training with a busy process on every core beside it, against idle cores.

    .venv/bin/python -m benchmarks.busy_cores [--rounds 3]

libgomp's threads wait for each other by spinning. On shared cores a spinning thread eats the time
its partner needs, and training falls to a few percent of its speed: the trap. The supervisor sets
GOMP_SPINCOUNT for every worker. Each round measures, one after the other, the shipped setting idle,
the same with busy neighbours, and libgomp's own default with and without them. The worker is the
shipped one, on a run folder that submit made; only the last two pairs differ in that variable.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import cases, ours
from benchmarks.bench import ensure_inputs
from benchmarks.peer import BENCH
from engine.core.files import read_json, write_json
from engine.home.run_dir import Home, RunDir

SHIPPED, DEFAULT = "10000", "300000"  # the supervisor's; libgomp's where nothing is said
LEAST_SHARE = 0.18
THREADS = 2
STEPS = 24
LIMIT_S = 120.0  # in the trap a run may take a hundred times as long


def main() -> int:
    parser = argparse.ArgumentParser(description="Training beside busy processes.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trap-rounds", type=int, default=1, help="rounds with libgomp's default")
    asked = parser.parse_args()
    if os.getloadavg()[0] > 1.5:
        print(
            f"load {os.getloadavg()[0]:.1f}: these cores are busy already, the share means little"
        )
    made = ensure_inputs()
    home = Home.locate(BENCH / "home")
    cores = ours.cores_for(THREADS)
    case = cases.CASES["sft-tiny"]
    env_id = ours.push(home, made / "cases" / case.name / "environment", case.name)
    settings = cases.settings(case) | {"steps": STEPS, "eval_every": STEPS, "save_every": STEPS}
    model = str(made / "models" / case.shape)
    template, _ = ours.train(home, env_id, model, "sft", settings, cores)
    rates: dict[str, list[float]] = {}
    for number in range(asked.rounds):
        spins = [SHIPPED] + ([DEFAULT] if number < asked.trap_rounds else [])
        for spin in spins:
            for busy in (False, True) if number % 2 == 0 else (True, False):
                rate = measure(template, number, spin, busy, cores)
                rates.setdefault(f"{name_of(spin)} {'busy' if busy else 'idle'}", []).append(rate)
                print(f"round {number + 1} {name_of(spin)} busy={busy}: {rate:.0f} tokens/s")
    report = summary(rates)
    print(json.dumps(report))
    print(said(report))
    return int(report["shipped_share"] <= LEAST_SHARE)


def name_of(spin: str) -> str:
    return "shipped" if spin == SHIPPED else "default"


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and for each setting the share of its idle throughput that is left when busy."""
    report: dict[str, Any] = {key: round(statistics.median(r), 1) for key, r in rates.items()}
    for name in ("shipped", "default"):
        if f"{name} busy" in rates and f"{name} idle" in rates:
            share = statistics.median(rates[f"{name} busy"]) / statistics.median(
                rates[f"{name} idle"]
            )
            report[f"{name}_share"] = round(share, 3)
    return report


def said(report: dict[str, Any]) -> str:
    shipped = report["shipped_share"]
    word = "pass" if shipped > LEAST_SHARE else "MISS"
    text = f"with busy cores {shipped:.0%} of the idle throughput is left"
    text += f" (above {LEAST_SHARE:.0%} is asked for): {word}"
    if "default_share" in report:
        text += f"; with libgomp's own spinning {report['default_share']:.1%}"
    return text


def measure(template: RunDir, number: int, spin: str, busy: bool, cores: Sequence[int]) -> float:
    """Tokens per second of one run of the worker on a copy of a submitted run's folder."""
    run = copy_of(template, f"{template.id}-{number}-{spin}-{'busy' if busy else 'idle'}")
    with neighbours(cores if busy else []):
        work(run, spin, cores)
    lines = ours.metric_lines(run)
    timed = ours.step_times(lines)
    tokens = sum(line["tokens"] for line in lines if line["step"] in {t[0] for t in timed})
    return tokens / (timed[-1][2] - timed[0][1])


def copy_of(template: RunDir, run_id: str) -> RunDir:
    """A run folder with the same config.json under another id."""
    run = template.home.run(run_id)
    shutil.rmtree(run.path, ignore_errors=True)
    run.create()
    write_json(run.config, read_json(template.config) | {"run_id": run_id})
    return run


@contextmanager
def neighbours(cores: Sequence[int]) -> Iterator[None]:
    """A process that never rests on each of the cores."""
    started = []
    try:
        for core in cores:
            with ours.on_cores([core]):
                command = [sys.executable, "-S", "-c", "while True: pass"]
                started.append(subprocess.Popen(command))
        if started:
            time.sleep(0.3)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def work(run: RunDir, spin: str, cores: Sequence[int]) -> None:
    """Run the worker as the supervisor does, with the number of spins given. A run that the trap
    holds up is stopped at the limit: the steps it has made are measured."""
    env = os.environ | {
        "GOMP_SPINCOUNT": spin,
        "HONESMITH_HOME": str(run.home.root),
        "HONESMITH_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with ours.on_cores(cores), open(run.log(1), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.worker", str(run.path)],
            cwd=run.path,
            env=env,
            stdout=log,
            stderr=log,
        )
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        if len(steps_made(run)) < 4:
            raise ours.RunFailed(f"{run.id} made no 4 steps in {LIMIT_S:g} s") from None
        return
    if status != 0:
        raise ours.RunFailed(f"{run.id} ended with {status}\n{ours.log_end(run)}")


def steps_made(run: RunDir) -> list[dict[str, Any]]:
    return ours.metric_lines(run) if run.metrics.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
