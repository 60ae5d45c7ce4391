"""Ours beside TRL on the CPU: `make bench`.

    .venv/bin/python -m benchmarks.bench [--only sft-tiny] [--rounds 5] [--fresh]

Both sides train identical models on identical rows in the same order, from the same adapter, with
the same settings, in turns. Ours is the shipped worker, started by submit (see ours.py); TRL runs
in an environment of its own (see trl_side.py). Every finished round is a line of
`.bench/results.jsonl`; a second call goes on where the first ended, and what was measured with
other software or settings does not count. Throughput is tokens/s for SFT and steps/s for GRPO.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import cases, flops, inputs, ours, pairs, peer
from benchmarks.cases import RANK, SHAPES, Case, Job
from benchmarks.peer import BENCH, ROOT, Peer
from engine.core.files import read_json, write_json
from engine.home.run_dir import Home

RESULTS = BENCH / "results.jsonl"
BEGUN = BENCH / "begun.json"  # the sides of a round that is not finished
GO_ON_S = 1800.0  # after so many seconds an interrupted round begins anew


def main() -> int:
    asked = arguments()
    if asked.fresh:
        for left in (RESULTS, BENCH / "home", BENCH / "start", BENCH / "inputs"):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(True)
    try:
        chosen = cases.jobs(asked.only, tuple(asked.threads))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not asked.table:
        measure(chosen, asked.rounds, time.monotonic() + 60 * asked.minutes)
    rounds = pairs.read(RESULTS)
    lines = [line for job in chosen for line in pairs.verdicts(job, shown(rounds, job))]
    print(machine())
    print(pairs.table(lines))
    missing = [job.name for job in chosen if rounds_left(job, asked.rounds)]
    if missing:
        print(f"not finished: {', '.join(missing)}; the same command goes on with them")
    return int(any(pairs.judged(line).startswith("MISS") for line in lines) or bool(missing))


def shown(rounds: list[pairs.Round], job: Job) -> list[pairs.Round]:
    """The rounds of the present code, or of the last code that was measured."""
    current = pairs.of(rounds, job, key(job))
    if current:
        return current
    keys = [line["key"] for line in rounds if line["job"] == job.name]
    if keys:
        print(f"{job.name} was measured with other code or libraries than are here now")
    return pairs.of(rounds, job, keys[-1]) if keys else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ours beside TRL on the CPU.")
    parser.add_argument("--only", default="", help="cases: sft, sft-tiny, grpo-long@2; with commas")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=50.0, help="start no round after these")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table")
    return parser.parse_args()


def measure(chosen: list[Job], rounds: int, deadline: float) -> None:
    """Every round that is missing, job by job, until the deadline."""
    due = [job for job in chosen if rounds_left(job, rounds)]
    if not due:
        return
    python = peer.ensure_venv()
    with peer.running(python, BENCH / "trl.log") as other:
        for job in due:
            for number in range(rounds - rounds_left(job, rounds), rounds):
                if time.monotonic() > deadline:
                    return
                line = one_round(job, number, inputs_of(job.case), other)
                pairs.append(RESULTS, line)
                print(said(job, number, line), flush=True)


def rounds_left(job: Job, rounds: int) -> int:
    return max(0, rounds - len(pairs.of(pairs.read(RESULTS), job, key(job))))


def key(job: Job) -> str:
    """What results are pooled under: case, libraries, and the code that was measured."""
    return cases.fingerprint(job, versions() | {"engine": code_digest()})


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "tokenizers")
    return {name: version(name) for name in names} | {"trl": peer.TRL}


@cache
def code_digest() -> str:
    """A digest of our code that decides how fast a run is, as it stands when this one begins."""
    digest = hashlib.sha256()
    for folder in ("engine/worker", "envs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def inputs_of(case: Case) -> Path:
    """The folder of models and rows that holds those of `case`."""
    real = cases.REAL_CASES
    return ensure_inputs(tuple(real.values()), *real) if case.name in real else ensure_inputs()


def ensure_inputs(
    wanted: Sequence[Case] = tuple(cases.CASES.values()),
    *names: str,
    limit_s: float | None = None,
) -> Path:
    """The folder of models and rows, made by a process of its own where it is missing.

    Args:
        names: of `wanted`, where these are not the cases of `make bench`; what is made.
        limit_s: seconds that it may take; None for any.

    Raises subprocess.TimeoutExpired.
    """
    facts = json.dumps([asdict(case) for case in wanted]).encode()
    digest = hashlib.sha256(Path(inputs.__file__).read_bytes() + facts).hexdigest()[:12]
    folder = BENCH / "inputs" / digest
    done = folder / "-".join(["done", *names])
    if not done.is_file():
        command = [sys.executable, "-m", "benchmarks.inputs", str(folder), *names]
        env = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        subprocess.run(command, cwd=ROOT, check=True, env=env, timeout=limit_s)
        done.touch()
    return folder


def one_round(job: Job, number: int, made: Path, other: Peer) -> dict[str, Any]:
    """Every side once, in turns, and the matrix rate beside them."""
    case = job.case
    facts = json.loads((made / "cases" / case.name / "facts.json").read_text())
    home = Home.locate(BENCH / "home")
    cores = ours.cores_for(job.threads)
    start = starting_adapter(home, case, made)
    line = begun({"job": job.name, "key": key(job), "round": number})
    for side in pairs.due(job, number):
        if side in line:
            continue
        if side == pairs.OURS:
            line[side] = run_ours(home, job, made, facts, cores)
        else:
            line[side] = run_peer(other, job, side, made, facts, cores, start, number)
        write_json(BEGUN, line)
    line["matmul"] = matrix_rate(other, job, facts, cores)
    line["torch_matmul"] = line["matmul"].pop("torch")
    line["load_after"] = os.getloadavg()[0]
    BEGUN.unlink()
    return line


def begun(names: dict[str, Any]) -> dict[str, Any]:
    """The round with these names as far as it was measured when the last call was interrupted; a
    new one where that is another or too long ago."""
    try:
        line = read_json(BEGUN)
        age = time.time() - BEGUN.stat().st_mtime
    except (OSError, ValueError):
        line, age = {}, 0.0
    if age < GO_ON_S and names.items() <= line.items():
        return line
    return names | {"time": time.time(), "load": os.getloadavg()[0]}


def run_ours(
    home: Home,
    job: Job,
    made: Path,
    facts: Mapping[str, Any],
    cores: list[int],
    limit_s: float = 900.0,
    **more: Any,
) -> dict[str, Any]:
    """One run of the shipped worker, as an entry of a round.

    Args:
        limit_s: seconds that it may take; then it is ended, and RunFailed raised.
        more: settings beside the case's.
    """
    case = job.case
    env_id = ours.push(home, made / "cases" / case.name / "environment", case.name)
    run, watched = ours.train(
        home,
        env_id,
        str(made / "models" / case.shape),
        case.algorithm,
        cases.settings(case) | more,
        cores,
        limit_s,
    )
    lines = ours.metric_lines(run)
    timed = ours.step_times(lines)
    began, ended = timed[0][1], timed[-1][2]
    measured = [step for step, _, _ in timed]
    entry = {
        "seconds": ended - began,
        "cpu_s": watched.cpu_at(ended) - watched.cpu_at(began),
        "rss_mb": watched.peak_mb,
        "steps": len(measured),
    }
    by_step = {line["step"]: line for line in lines}
    entry["mfu"] = sum(by_step[step]["mfu"] for step in measured) / len(measured)
    if case.algorithm == "sft":
        entry["losses"] = [by_step[step]["loss"] for step in sorted(by_step) if step]
        entry["tokens"] = sum(by_step[step]["tokens"] for step in measured)
    else:
        entry["losses"] = []
        entry["rewards"] = [by_step[step]["reward_mean"] for step in sorted(by_step) if step]
        for name in ("sample_s", "train_s"):
            entry[name] = sum(by_step[step][name] for step in measured) / len(measured)
    done = work(case, facts, measured) / 1e9
    entry |= {"gflops": done / entry["seconds"], "gflops_cpu": done / entry["cpu_s"]}
    return rated(entry, case)


def run_peer(
    other: Peer,
    job: Job,
    variant: str,
    made: Path,
    facts: Mapping[str, Any],
    cores: list[int],
    start: Path | None,
    number: int,
    **more: Any,
) -> dict[str, Any]:
    """One run of TRL, as an entry of a round. Where it chooses the batches by chance, every round
    sees others.

    Args:
        more: for the request, such as the device.
    """
    case = job.case
    tokens = sum(row["tokens"] for row in facts["rows"][: case.steps * case.prompts])
    answer = other.ask(
        {
            "do": case.algorithm,
            "variant": variant,
            "cores": cores,
            "model": str(made / "models" / case.shape),
            "start": str(start or ""),
            "rows": facts["rows"],
            "environment": str(made / "cases" / case.name / "environment" / "environment.py"),
            "packed_tokens": tokens // case.steps,  # a packed step holds about as many
            "lr_schedule": cases.settings(case)["lr_schedule"],
            "seed": case.seed + number,
            **{
                name: getattr(case, name)
                for name in (
                    "steps",
                    "prompts",
                    "group",
                    "new_tokens",
                    "learning_rate",
                    "max_length",
                )
            },
            **more,
        }
    )
    if answer.get("same_batches") and answer["all_tokens"] != tokens:
        raise peer.PeerFailed(f"TRL read {answer['all_tokens']} tokens where we have {tokens}")
    return rated(answer, case)


def rated(entry: dict[str, Any], case: Case) -> dict[str, Any]:
    """An entry with its throughput: tokens (SFT) or steps (GRPO) per second."""
    amount = entry["tokens"] if case.algorithm == "sft" else entry["steps"]
    rates = {"rate": amount / entry["seconds"], "rate_cpu": amount / entry["cpu_s"]}
    return {**entry, **rates}


def work(case: Case, facts: Mapping[str, Any], measured: list[int]) -> float:
    """FLOPs of the measured steps, by flops.py; completions count at their full length."""
    shape, total = SHAPES[case.shape], 0.0
    for step in measured:
        rows = facts["rows"][(step - 1) * case.prompts : step * case.prompts]
        lengths = [row["tokens"] for row in rows]
        if case.algorithm == "sft":
            supervised = sum(row["tokens"] - row["prompt_tokens"] for row in rows)
            total += flops.sft_step(shape, RANK, lengths, supervised)
        else:
            sizes = (lengths, case.group, case.new_tokens)
            total += flops.grpo_rollout(shape, *sizes) + flops.grpo_update(shape, RANK, *sizes)
    return total


def matrix_rate(
    other: Peer, job: Job, facts: Mapping[str, Any], cores: list[int], **more: Any
) -> dict[str, Any]:
    """GFLOP/s of products at this model's shapes and batch size, on these cores or this device;
    under `torch` those of `torch.matmul` alone."""
    case = job.case
    tokens = sum(row["tokens"] for row in facts["rows"]) * case.prompts // len(facts["rows"])
    if case.algorithm == "grpo":
        tokens += case.prompts * case.group * case.new_tokens
    matrices = sorted(flops.projections(SHAPES[case.shape]).values())
    asked = {"do": "matmul", "cores": cores, "matrices": matrices, "tokens": tokens}
    return other.ask(asked | {"seconds": 0.1} | more)


def starting_adapter(home: Home, case: Case, made: Path) -> Path:
    """The adapter our run of this model and seed starts from, as a file both sides can read.

    Taken from a run of one step: as long as the second matrices are zero the first ones get no
    gradient, so after it they still are what they were; the second ones are set to zero again.
    """
    digest = hashlib.sha256(f"{made.name}-{case.shape}-{case.seed}-{code_digest()}".encode())
    target = BENCH / "start" / f"{digest.hexdigest()[:12]}.safetensors"
    if target.is_file():
        return target
    every = [*cases.CASES.values(), *cases.REAL_CASES.values()]
    source = next(c for c in every if c.shape == case.shape and c.algorithm == "sft")
    env_id = ours.push(home, made / "cases" / source.name / "environment", source.name)
    settings = cases.settings(source) | {"seed": case.seed, "steps": 1, "batch_size": 1}
    settings |= {"eval_every": 1, "save_every": 1}
    model = str(made / "models" / case.shape)
    run, _ = ours.train(home, env_id, model, "sft", settings, ours.cores_for(1))
    zero_second_matrices(run.checkpoint(1) / "adapter_model.safetensors", target)
    return target


def zero_second_matrices(source: Path, target: Path) -> None:
    """Copy a safetensors file with every `lora_B` set to zero."""
    target.parent.mkdir(parents=True, exist_ok=True)
    data = bytearray(source.read_bytes())
    size = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(bytes(data[8 : 8 + size])).items():
        if "lora_B" in name:
            low, high = (8 + size + offset for offset in entry["data_offsets"])
            data[low:high] = bytes(high - low)
    target.write_bytes(data)


def said(job: Job, number: int, line: pairs.Round) -> str:
    """A finished round in a line."""
    own = line[pairs.OURS]
    parts = [f"{job.name} round {number + 1}: ours {own['rate']:.4g}/s"]
    for variant in job.case.variants:
        if variant in line:
            other = line[variant]
            parts.append(
                f"{variant} {own['rate'] / other['rate']:.2f}x"
                f" (cpu {own['rate_cpu'] / other['rate_cpu']:.2f}x)"
            )
    of_torch = pairs.share([line], "torch_matmul")
    parts.append(f"{pairs.share([line]):.0%} of matmul ({of_torch:.0%} of torch.matmul)")
    parts.append(f"load {line['load']:.1f}")
    return ", ".join(parts)


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    libraries = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"{cores} cores ({platform.machine()}), Python {platform.python_version()}, {libraries}"


if __name__ == "__main__":
    sys.exit(main())
