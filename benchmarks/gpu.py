"""Ours beside TRL on a GPU: `make bench-gpu`.

    .venv/bin/python -m benchmarks.gpu [--only sft-1.7b] [--rounds 3] [--wheels FOLDER]

Randomly initialised models of Qwen3's 0.6B, 1.7B and 4B sizes in bfloat16, made here; nothing is
downloaded. On a machine without a package index give `--wheels`, a folder of wheels carried along;
packages that are unpacked already are found through PYTHONPATH, TRL too if it is among them.
One round runs ours (the shipped worker, started by submit) and TRL's variants one after the other.
Prints tokens/s, the share of the matrix rate measured in the same run (flops.py says what counts as
work), the device memory either side took at most, and how long sampling 64 completions at once
took against the time that reading weights and cache once per token would take at the bandwidth
measured. Finished rounds are kept in `.bench/gpu.jsonl`; the same command goes on after them.
"""

import argparse
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import bench, cases, flops, pairs, peer
from benchmarks.cases import SHAPES, Job
from benchmarks.peer import BENCH, Peer
from engine.core import hardware
from engine.home.run_dir import Home

RESULTS = BENCH / "gpu.jsonl"
DECODE_LIMIT = 2.5  # times the bandwidth floor
SHARE_ASKED = {"sft-1.7b": 0.5, "sft-4b": 0.5}  # of the matrix rate
TOKENS_ASKED = {"sft-4b": 20_000.0, "sft-0.6b": 80_000.0}  # per second on one H200
NO_GPU = (
    "no CUDA device was found: this benchmark measures a GPU. On a GPU machine run the same "
    "command; make bench measures the CPU."
)


def main() -> int:
    asked = arguments()
    device = hardware.detect().device
    if device.kind != "cuda":
        print(NO_GPU, file=sys.stderr)
        return 2
    try:
        chosen = cases.jobs(asked.only, (0,), cases.GPU_CASES, {})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    measure(chosen, asked.rounds, time.monotonic() + 60 * asked.minutes, peer_python(asked))
    rounds = pairs.read(RESULTS)
    print(f"{device.name}, {bench.machine()}")
    shown = [(job, bench.shown(rounds, job)) for job in chosen]
    print(pairs.table([line for job, lines in shown for line in pairs.verdicts(job, lines)]))
    for job, lines in shown:
        for line in notes(job, lines):
            print(line)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ours beside TRL on a GPU.")
    parser.add_argument("--only", default="", help="cases: sft, 4b, sft-1.7b; with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=25.0, help="start no round after these")
    parser.add_argument("--wheels", type=Path, help="install TRL's environment from these wheels")
    parser.add_argument("--peer-python", default="", help="an interpreter that has TRL")
    return parser.parse_args()


def peer_python(asked: argparse.Namespace) -> Path:
    """The interpreter TRL runs with: the one named, this one if it has TRL, else one built."""
    if asked.peer_python:
        return Path(asked.peer_python)
    if importlib.util.find_spec("trl") is not None:
        return Path(sys.executable)
    return peer.ensure_venv(wheels=asked.wheels)


def measure(chosen: Sequence[Job], rounds: int, deadline: float, python: Path) -> None:
    """Every round that is missing, until the deadline."""
    with peer.running(python, BENCH / "trl.log", os.environ.get("PYTHONPATH", "")) as other:
        for job in chosen:
            had = len(pairs.of(pairs.read(RESULTS), job, bench.key(job)))
            for number in range(had, rounds):
                if time.monotonic() > deadline:
                    return
                line = one_round(job, number, other)
                pairs.append(RESULTS, line)
                print(bench.said(job, number, line), flush=True)


def one_round(job: Job, number: int, other: Peer) -> dict[str, Any]:
    """Every side once, and what the device can do beside them. A variant of TRL that does not fit
    into memory is tried again with activations recomputed."""
    case = job.case
    made = bench.ensure_inputs((case,), case.name)
    facts = json.loads((made / "cases" / case.name / "facts.json").read_text())
    home, cores = Home.locate(BENCH / "home"), sorted(os.sched_getaffinity(0))
    line: dict[str, Any] = {
        "job": job.name,
        "key": bench.key(job),
        "round": number,
        "time": time.time(),
        "load": os.getloadavg()[0],
    }
    for side in pairs.due(job, number):
        with device_memory() as peak:
            if side == pairs.OURS:
                entry = bench.run_ours(home, job, made, facts, cores)
            else:
                entry = run_peer(other, job, side, made, facts, cores, number)
        # The table's memory column is the device's here, not the machine's.
        line[side] = entry | {"rss_mb": max(peak) / 2**20}
    line["matmul"] = bench.matrix_rate(other, job, facts, cores, device="cuda", repeat=10)
    del line["matmul"]["torch"]
    del line["matmul"]["gflops_cpu"]  # the processor does not multiply here
    line["bytes_per_s"] = other.ask({"do": "bandwidth"})["bytes_per_s"]
    line["prompt_tokens"] = [row["tokens"] for row in facts["rows"]]
    return line


def run_peer(
    other: Peer,
    job: Job,
    side: str,
    made: Path,
    facts: Mapping[str, Any],
    cores: list[int],
    number: int,
) -> dict[str, Any]:
    for checkpointing in (False, True):
        more = {"device": "cuda", "checkpointing": checkpointing}
        try:
            return bench.run_peer(other, job, side, made, facts, cores, None, number, **more)
        except peer.PeerFailed as error:
            if "OutOfMemoryError" not in str(error) or checkpointing:
                raise
    raise AssertionError("unreachable")


@contextmanager
def device_memory() -> Iterator[list[int]]:
    """Bytes of device memory taken above what was taken before, one sample every 50 ms."""
    before, samples, over = used_memory(), [0], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            samples.append(max(0, used_memory() - before))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield samples
    finally:
        over.set()
        watcher.join()


def used_memory() -> int:
    """Bytes taken of the device that runs are planned for."""
    device = hardware.detect().device
    return device.memory_total - device.memory_free


def notes(job: Job, rounds: Sequence[pairs.Round]) -> list[str]:
    """What the table has no column for: tokens/s asked for, decoding against its floor."""
    if not rounds:
        return []
    values = pairs.side(rounds, pairs.OURS)
    out = []
    if values and job.case.name in TOKENS_ASKED:
        asked = TOKENS_ASKED[job.case.name]
        word = "pass" if values.rate >= asked else "MISS"
        out.append(f"{job.case.name}: {values.rate:,.0f} tokens/s, {asked:,.0f} asked: {word}")
    if values and job.case.name in SHARE_ASKED:
        asked, reached = SHARE_ASKED[job.case.name], pairs.share(rounds)
        word = "pass" if reached >= asked else "MISS"
        out.append(f"{job.case.name}: {reached:.0%} of the matrix rate, {asked:.0%} asked: {word}")
    if job.case.algorithm == "grpo":
        times = [line["ours"]["sample_s"] / decode_floor(job, line) for line in rounds]
        worst = max(times)
        word = "pass" if worst <= DECODE_LIMIT else "MISS"
        rows = job.case.prompts * job.case.group
        out.append(
            f"{job.case.name}: sampling {rows} completions takes {worst:.2f} times the bandwidth "
            f"floor, at most {DECODE_LIMIT:g} asked: {word}"
        )
    return out


def decode_floor(job: Job, line: Mapping[str, Any]) -> float:
    """Least seconds for one step's completions, by the bandwidth measured in the round."""
    case = job.case
    prompt = sum(line["prompt_tokens"]) / len(line["prompt_tokens"])
    context = prompt + case.new_tokens / 2
    rows = case.prompts * case.group
    once = flops.decode_floor_s(SHAPES[case.shape], rows, context, line["bytes_per_s"])
    return once * case.new_tokens


if __name__ == "__main__":
    sys.exit(main())
