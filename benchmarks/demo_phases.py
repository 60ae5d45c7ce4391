"""The training phases of `honesmith demo` beside TRL doing the same steps.

    .venv/bin/python -m benchmarks.demo_phases [--rounds 3] [--seed 0] [--before CHECKOUT]

With `--before`, a folder with an earlier state of this repository, its worker takes part as well.
Both sides run the demo's SFT phase and, from the adapter ours ends with, its GRPO phase: pebble in
float32 on the arithmetic environment, the demo's own settings, the same rows in the same order, the
same learning rate at every step, the same seed. Held-out exams are no training and are moved out of
the way: one before the first step and one in the last, which are not counted. The GRPO completions
are each side's own. A phase's time is the sum of its steps' times, without the first and the last.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ours, peer
from benchmarks.cases import LOSS_TOLERANCE
from benchmarks.peer import BENCH, ROOT, Peer
from engine.core.files import read_json
from engine.home.run_dir import Home, RunDir
from mcp_server.cli.demo.plans import PLANS

RESULTS = BENCH / "demo.jsonl"
LEAST_RATIO = 3.0
PHASES = ("sft", "grpo")
PLAN = PLANS["pebble"]
SETTINGS: dict[str, dict[str, Any]] = {
    training.algorithm: dict(training.settings) for training in PLAN.trainings
}


def main() -> int:
    parser = argparse.ArgumentParser(description="The demo's training phases beside TRL.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ours-only", action="store_true", help="record ours without TRL")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier state, beside ours")
    parser.add_argument("--home", type=Path, default=BENCH / "home")
    asked = parser.parse_args()
    cores = ours.cores_for(asked.threads)
    rounds = []
    with contextlib.ExitStack() as stack:
        other = None
        if not asked.ours_only:
            python = peer.ensure_venv()
            other = stack.enter_context(peer.running(python, BENCH / "trl.log"))
        for number in range(asked.rounds):
            line = one_round(Home.locate(asked.home), other, number, asked.seed, cores)
            if asked.before:
                line["before"] = earlier(asked.before, asked.seed, asked.threads)
            keep(line)
            rounds.append(line)
    report = summary(rounds)
    print(json.dumps(report))
    print(said(report))
    return int(report.get("ratio", LEAST_RATIO) < LEAST_RATIO)


def earlier(checkout: Path, seed: int, threads: int) -> dict[str, float]:
    """Seconds of both phases with the worker of another checkout, in a home of its own: this
    module runs again, with that folder's packages before ours."""
    command = [sys.executable, "-m", "benchmarks.demo_phases", "--ours-only", "--rounds", "1"]
    command += ["--seed", str(seed), "--threads", str(threads)]
    command += ["--home", str(BENCH / "home-before")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout.resolve()), str(ROOT)])}
    result = subprocess.run(
        command, cwd="/", env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    report = next(json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    return {name: report[f"ours_{name}_s"] for name in PHASES}


def keep(line: Mapping[str, Any]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with open(RESULTS, "a") as file:
        file.write(json.dumps(line) + "\n")
    for name in PHASES:
        print(f"round {line['round'] + 1} {name}: {brief(line, name)}", flush=True)


def one_round(
    home: Home, other: Peer | None, number: int, seed: int, cores: Sequence[int]
) -> dict[str, Any]:
    """Both phases of ours, then both of TRL: it starts GRPO from our adapter."""
    line: dict[str, Any] = {"round": number, "seed": seed, "time": time.time(), "ours": {}}
    env = PLAN.trainings[0].env  # of both phases
    env_id = ours.push(home, ROOT / "envs" / "examples" / env, env)
    sft, line["ours"]["sft"] = phase(home, env_id, PLAN.model, "sft", seed, cores)
    tuned = f"{sft.id}@step{SETTINGS['sft']['steps']}"
    grpo, line["ours"]["grpo"] = phase(home, env_id, tuned, "grpo", seed, cores)
    if other is not None:
        line["trl"] = {
            "sft": peer_phase(other, sft, seed, cores, ours.metric_lines(sft)),
            "grpo": peer_phase(other, grpo, seed, cores, ours.metric_lines(grpo)),
        }
    return line


def brief(line: Mapping[str, Any], name: str) -> str:
    own = line["ours"][name]
    text = f"ours {own['seconds']:.2f} s for {own['steps']} steps"
    if "trl" in line:
        theirs = line["trl"][name]
        text += f", TRL {theirs['seconds']:.2f} s, {theirs['seconds'] / own['seconds']:.2f}x"
    if "before" in line:
        text += f", before {line['before'][name]:.2f} s"
    return text


def phase(
    home: Home, env_id: str, model: str, name: str, seed: int, cores: Sequence[int]
) -> tuple[RunDir, dict[str, Any]]:
    """One of our runs with the demo's settings, and what it took."""
    steps = SETTINGS[name]["steps"]
    settings = {
        **SETTINGS[name],
        "seed": seed,
        "eval_every": steps,
        "save_every": steps,
        "eval_rows": 2,
    }
    run, watched = ours.train(home, env_id, model, name, settings, cores)
    lines = ours.metric_lines(run)
    timed = ours.step_times(lines)
    began, ended = timed[0][1], timed[-1][2]
    curve = "loss" if name == "sft" else "reward_mean"
    return run, {
        "seconds": ended - began,
        "cpu_s": watched.cpu_at(ended) - watched.cpu_at(began),
        "steps": len(timed),
        "curve": [line[curve] for line in lines if line["step"]],
        "rss_mb": watched.peak_mb,
    }


def peer_phase(
    other: Peer, run: RunDir, seed: int, cores: Sequence[int], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """TRL on the rows, the settings and the learning rates of one of our runs."""
    config = read_json(run.config)
    settings, name = config["settings"], config["algorithm"]
    facts = rows_of(run)
    start = config["start_adapter"]
    rates = [line["lr"] for line in lines if line["step"]]
    asked = {
        "do": name,
        "variant": "padded" if name == "sft" else "dynamic",
        "cores": list(cores),
        "model": config["base"]["path"],
        "start": str(Path(start) / "adapter_model.safetensors") if start else "",
        "rows": facts,
        "environment": str(Path(config["env_dir"]) / "source" / "environment.py"),
        "packed_tokens": 0,
        "lr_schedule": "constant",
        "rates": rates,
        "learning_rate": settings["learning_rate"],
        "max_length": settings["max_length"],
        "steps": settings["steps"],
        "prompts": settings.get("batch_size") or settings["prompts_per_step"],
        "group": settings.get("group_size", 0),
        "new_tokens": settings.get("max_tokens", 0),
        "seed": seed,
    }
    answer = other.ask(asked)
    answer["curve"] = answer["losses"] if name == "sft" else answer["rewards"]
    return answer


def rows_of(run: RunDir) -> list[dict[str, Any]]:
    """The conversations of a run in the order it trained on them, as many as its steps take."""
    command = [sys.executable, "-m", "benchmarks.demo_rows", str(run.path)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of each phase and of both together, the ratios inside rounds, the first curves."""
    report: dict[str, Any] = {"benchmark": "demo_phases", "rounds": len(rounds)}
    sides = [side for side in ("ours", "trl") if all(side in line for line in rounds)]
    for side in sides:
        for name in PHASES:
            seconds = [line[side][name]["seconds"] for line in rounds]
            report[f"{side}_{name}_s"] = round(statistics.median(seconds), 3)
        report[f"{side}_s"] = round(
            statistics.median(sum(line[side][n]["seconds"] for n in PHASES) for line in rounds), 3
        )
    if "trl" in sides:
        for name in (*PHASES, "both"):
            parts = PHASES if name == "both" else (name,)
            ratios = [
                sum(line["trl"][n]["seconds"] for n in parts)
                / sum(line["ours"][n]["seconds"] for n in parts)
                for line in rounds
            ]
            report["ratio" if name == "both" else f"{name}_ratio"] = round(
                statistics.median(ratios), 3
            )
        report["sft_loss_gap"] = max(
            abs(a - b) / abs(b)
            for line in rounds
            for a, b in zip(line["ours"]["sft"]["curve"], line["trl"]["sft"]["curve"], strict=True)
        )
        for side in sides:
            report[f"{side}_reward"] = [
                round(statistics.fmean(line[side]["grpo"]["curve"][-5:]), 3) for line in rounds
            ]
    if all("before" in line for line in rounds):
        report["before_ratio"] = round(
            statistics.median(
                sum(line["before"].values()) / sum(line["ours"][n]["seconds"] for n in PHASES)
                for line in rounds
            ),
            3,
        )
    report["ours_loss"] = rounds[0]["ours"]["sft"]["curve"][-1]
    return report


def said(report: Mapping[str, Any]) -> str:
    before = (
        f"; {report['before_ratio']:.2f}x as fast as before" if "before_ratio" in report else ""
    )
    if "ratio" not in report:
        took = f"ours: SFT {report['ours_sft_s']:.2f} s, GRPO {report['ours_grpo_s']:.2f} s"
        return took + before
    word = "pass" if report["ratio"] >= LEAST_RATIO else "MISS"
    same = "same" if report["sft_loss_gap"] <= LOSS_TOLERANCE else "DIFFERENT"
    return (
        f"training phases {report['ratio']:.2f}x as fast as TRL (at least {LEAST_RATIO:g} is asked "
        f"for): {word}; SFT {report['sft_ratio']:.2f}x with the {same} losses "
        f"(gap {report['sft_loss_gap']:.1e}), GRPO {report['grpo_ratio']:.2f}x{before}"
    )


if __name__ == "__main__":
    sys.exit(main())
