"""Our AdamW (engine/worker/update/optimizer.py) beside torch.optim.AdamW(fused=True).

    .venv/bin/python -m benchmarks.optimizer

Prints one JSON object: what the first step of each costs a fresh process beyond `import torch`
(resident memory, CPU seconds; medians of `ROUNDS`), and how long later steps take on the adapter of
a small model, both in one process, in turns, on one thread. Exits 1 where the two leave other
weights.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.worker.update.optimizer import BETAS, EPS, AdamW

ROUNDS, STEPS = 5, 400
HIDDEN, WIDE, LAYERS, RANK = 192, 512, 4, 16  # pebble's, all projections adapted
RATE, DECAY = 1e-3, 0.01

Step = Callable[[], object]


def main() -> int:
    if sys.argv[1:]:
        print(json.dumps(first_step(sys.argv[1])))
        return 0
    report: dict[str, object] = {"torch": torch.__version__, "rounds": ROUNDS, "steps": STEPS}
    for name in ("ours", "torch"):
        costs = [in_fresh_process(name) for _ in range(ROUNDS)]
        for unit in ("megabytes", "cpu_seconds"):
            report[f"{name}_first_step_{unit}"] = statistics.median(cost[unit] for cost in costs)
    times, same = later_steps()
    medians = {name: statistics.median(values) for name, values in times.items()}
    report |= {f"{name}_step_us": round(1e6 * value, 1) for name, value in medians.items()}
    report |= {"step_ratio": round(medians["ours"] / medians["torch"], 3), "same_weights": same}
    print(json.dumps(report, indent=1))
    return 0 if same else 1


def in_fresh_process(name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.optimizer", name]
    root = Path(__file__).parents[1]
    return json.loads(subprocess.run(command, check=True, capture_output=True, cwd=root).stdout)


def first_step(name: str) -> dict[str, float]:
    """Resident megabytes and CPU seconds of making an optimizer and moving one parameter."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    memory, began = resident(), time.process_time()
    step_of(name, [parameter])()
    seconds = time.process_time() - began
    return {"megabytes": round(resident() - memory, 1), "cpu_seconds": round(seconds, 3)}


def later_steps() -> tuple[dict[str, list[float]], bool]:
    """Seconds of each step of both on the same gradients, and whether they leave equal weights."""
    torch.set_num_threads(1)
    sides = {name: adapter() for name in ("ours", "torch")}
    steps = {name: step_of(name, parameters) for name, parameters in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(STEPS):
        gradients = [torch.randn_like(parameter) for parameter in sides["ours"]]
        for name, parameters in sides.items():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            began = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - began)
    return times, all(map(torch.equal, *sides.values()))


def step_of(name: str, parameters: list[torch.nn.Parameter]) -> Step:
    if name == "ours":
        return AdamW(parameters, RATE, DECAY).step
    optimizer = torch.optim.AdamW(
        parameters, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    return optimizer.step


def adapter() -> list[torch.nn.Parameter]:
    """Both factors of every projection of every layer, the same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    layer = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, WIDE)] * 2 + [(WIDE, HIDDEN)]
    shapes = [shape for inside, out in layer * LAYERS for shape in ((RANK, inside), (out, RANK))]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def resident() -> float:
    """Megabytes this process holds now; where /proc is missing, the most it ever held."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1000


if __name__ == "__main__":
    sys.exit(main())
