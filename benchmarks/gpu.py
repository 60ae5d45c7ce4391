"""Ours beside TRL on a GPU: `make bench-gpu`, or with PYTHONPATH alone and no index

    PYTHONPATH=. python -m benchmarks.gpu --wheels wheels/ [--only 4b] [--minutes 25]

SFT, GRPO and sampling alone of randomly initialised models with Qwen3's 0.6B, 1.7B, 4B and 8B
shapes in bfloat16, made here; nothing is downloaded. Each case is measured on our side, with our
own sampler and with vLLM, then through TRL and through TRL with vLLM, with the memory that each
takes. It ends within `--minutes`. What was not measured stands in the table with the reason, and
the same command goes on with it. The results are in `.bench/gpu.json`.

`--device cpu` measures tiny shapes on the CPU, to try the benchmark itself.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks import bench, cases
from benchmarks.cases import Case, Job
from benchmarks.gpu_sides import OURS, TRL_VLLM, Bench, Late, Skipped, sides_of
from benchmarks.peer import BENCH
from engine.core import hardware
from engine.core.files import read_object, write_json
from engine.core.hardware import Device
from engine.home.run_dir import Home
from engine.machine.fast_paths.examine import examine_device
from engine.machine.fast_paths.results import all_results

RESULTS = BENCH / "gpu.json"
LEAST_S = 20.0  # nothing is begun with less time left
ENDING_S = 60.0  # kept for ending what takes too long, on a busy machine too
CELL_MINUTES = 8.0  # that one side of one case may take
EXAMINE_S = 300.0  # trying the fast paths first needs so much time left
# What is asked of our side on one H200: tokens/s at least, seconds of a step at most, and how many
# times the rate of TRL with vLLM.
RATES_ASKED = {"sft-0.6b": 80_000.0, "sft-4b": 20_000.0, "decode-4b": 20_000.0}
STEPS_ASKED = {"grpo-4b-64x8": 60.0}
RATIO_ASKED = 2.5
NO_GPU = (
    "no CUDA device was found: this benchmark measures a GPU. On a GPU machine run the same "
    "command; --device cpu tries it on a tiny shape, make bench measures the CPU."
)


class Measures(Protocol):
    """What measures one side of a case; see `gpu_sides.Bench`."""

    def measure(self, case: Case, side: str, limit_s: float) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Limits:
    """When to end, on the monotonic clock, and what one side may take."""

    began: float
    whole_s: float
    cell_s: float = 60 * CELL_MINUTES
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.began + self.whole_s - self.clock()


def main() -> int:
    began = time.monotonic()
    asked = arguments()
    device = chosen_device(asked.device)
    if device is None:
        print(NO_GPU, file=sys.stderr)
        return 2
    among = cases.GPU_CASES if device.kind == "cuda" else cases.SELF_TEST
    try:
        chosen = [job.case for job in cases.jobs(asked.only, (0,), among, {})]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    home = Home.locate(BENCH / "home")
    limits = Limits(began, 60 * asked.minutes)
    python = Path(asked.peer_python) if asked.peer_python else None
    measuring = Bench(device, home, python, asked.wheels)
    if device.kind == "cuda":
        examine(home, device, limits)
    try:
        rows = measure_all(chosen, sides(asked.sides), measuring, limits, kept(RESULTS))
    finally:
        measuring.close()
    report = {
        "device": device.name,
        "machine": bench.machine(),
        "driver": hardware.driver() if device.kind == "cuda" else "",
        "minutes": asked.minutes,
        "took_s": round(time.monotonic() - began, 1),
        "fast_paths_off": {k: why for found in all_results(home) for k, why in found.off.items()},
        "rows": rows,
    }
    write_json(RESULTS, report)
    print(f"{device.name}, {bench.machine()}; {report['took_s']:.0f} s, results in {RESULTS}")
    print(table(rows))
    print("\n".join(goals(rows)))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ours beside TRL on a GPU.")
    parser.add_argument("--only", default="", help="cases: sft, 4b, sft-1.7b; with commas")
    parser.add_argument("--sides", default="", help="ours, vllm, trl; with commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=25.0, help="the whole ends within these")
    parser.add_argument("--wheels", type=Path, help="install TRL's environment from these wheels")
    parser.add_argument("--peer-python", default="", help="an interpreter that has TRL")
    return parser.parse_args()


def chosen_device(kind: str) -> Device | None:
    """The device that is measured, which alone is visible from now on, to TRL too; None where there
    is none of that kind."""
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return hardware.detect().device
    gpus = [device for device in hardware.detect().devices if device.kind == "cuda"]
    if not gpus:
        return None
    emptiest = max(gpus, key=lambda device: device.memory_free)
    os.environ["CUDA_VISIBLE_DEVICES"] = emptiest.visible
    return emptiest


def sides(words: str) -> Callable[[str], bool]:
    """Whether a side is among those that `words` names; "" names all."""
    named = [word.strip().lower() for word in words.split(",") if word.strip()]
    return lambda side: (
        not named or any(side == word or (word != OURS and word in side.lower()) for word in named)
    )


def examine(home: Home, device: Device, limits: Limits) -> None:
    """Try the fast paths of the device where that was not done, as the first run would."""
    if limits.left_s > EXAMINE_S and not all_results(home):
        examine_device(home, device, report=lambda result: print(result.name, result.state))


def kept(path: Path) -> dict[str, dict[str, Any]]:
    """Rows that earlier calls have measured, by their key."""
    rows = read_object(path).get("rows") or []
    return {row["key"]: row for row in rows if row["state"] == "measured"}


def measure_all(
    chosen: Sequence[Case],
    wanted: Callable[[str], bool],
    measuring: Measures,
    limits: Limits,
    earlier: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """A row for each side of each case: what was measured, or why it was not."""
    rows = []
    for case in chosen:
        for side in sides_of(case):
            key = f"{bench.key(Job(case, 0))} {side}"
            row = earlier.get(key)
            if row is None:
                row = {"case": case.name, "side": side, "key": key}
                row |= (
                    one_side(case, side, measuring, limits)
                    if wanted(side)
                    else {"state": "skipped", "why": "it was not asked for"}
                )
                print(said(row), flush=True)
            rows.append(row)
    return rows


def one_side(case: Case, side: str, measuring: Measures, limits: Limits) -> dict[str, Any]:
    """The numbers of a side, or `why` it has none."""
    whole = f"the limit of {limits.whole_s / 60:g} min"
    left_s = limits.left_s - ENDING_S
    if left_s < LEAST_S:
        return {"state": "skipped", "why": f"{whole} is reached"}
    limit_s = min(left_s, limits.cell_s)
    began = limits.clock()
    try:
        numbers = measuring.measure(case, side, limit_s)
    except Skipped as error:
        return {"state": "skipped", "why": str(error)}
    except Late:
        took_s = limits.clock() - began
        return {"state": "skipped", "why": f"not done after {took_s:.0f} s, within {whole}"}
    except Exception as error:  # noqa: BLE001 - one side's failure is a row, not the end
        words = " ".join(str(error).split())[-300:]
        return {"state": "failed", "why": f"{type(error).__name__}: {words}"}
    return {"state": "measured", **numbers}


def said(row: dict[str, Any]) -> str:
    """A row in a line."""
    if row["state"] != "measured":
        return f"{row['case']}, {row['side']}: {row['state']}: {row['why']}"
    return f"{row['case']}, {row['side']}: {row['rate']:,.0f} tokens/s, {row['step_s']:.2f} s"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table; `ours by` is our rate by that side's."""
    ours = {row["case"]: row["rate"] for row in rows if row["side"] == OURS and "rate" in row}
    lines = [
        "| case | side | tokens/s | s/step | sampling s | update s | memory GB | ours by | |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        if row["state"] != "measured":
            why = f"{row['state']}: {row['why']}".replace("|", "/")
            lines.append(f"| {row['case']} | {row['side']} | | | | | | | {why} |")
            continue
        ratio = f"{ours[row['case']] / row['rate']:.2f}" if row["case"] in ours else ""
        parts = [f"{row[name]:.2f}" if name in row else "" for name in ("sample_s", "train_s")]
        lines.append(
            f"| {row['case']} | {row['side']} | {row['rate']:,.0f} | {row['step_s']:.2f} "
            f"| {parts[0]} | {parts[1]} | {row['memory_gb']:.1f} | {ratio} | "
            f"{json.dumps(row['with']) if row.get('with') else ''} |"
        )
    return "\n".join(lines)


def goals(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was asked and what was reached, a line each, of what was measured; the better of our two
    samplers counts."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = best.get(row["case"])
        is_ours = row["side"].startswith(OURS) and row["state"] == "measured"
        if is_ours and (known is None or row["rate"] > known["rate"]):
            best[row["case"]] = row
    lines = []
    for case, row in best.items():
        if case in RATES_ASKED:
            lines.append(_goal(case, row["rate"], RATES_ASKED[case], "tokens/s"))
        if case in STEPS_ASKED:
            lines.append(
                _goal(case, STEPS_ASKED[case], row["step_s"], "s of a step, asked, reached")
            )
    for row in rows:
        if row["side"] == TRL_VLLM and row["state"] == "measured" and row["case"] in best:
            ratio = best[row["case"]]["rate"] / row["rate"]
            lines.append(_goal(row["case"], ratio, RATIO_ASKED, f"times {TRL_VLLM}"))
    return lines


def _goal(case: str, reached: float, asked: float, unit: str) -> str:
    """A line that says whether the first number is at least the second."""
    word = "pass" if reached >= asked else "MISS"
    return f"{case}: {reached:,.4g}, {asked:,.4g} {unit}: {word}"


if __name__ == "__main__":
    sys.exit(main())
