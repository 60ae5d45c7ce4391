"""Everything `make bench` measures, within an hour on two cores.

    .venv/bin/python -m benchmarks.all [--only cold,sft-tiny,grpo] [--fresh]

Sections: `cold` (start of the server), `parity` (gradients against TRL's), the training cases of
cases.py by name or by algorithm, `busy` (two threads beside busy neighbours) and `demo` (the
training phases of the demo). The training cases are kept in `.bench/results.jsonl` and continued by
the next call; they get what time the short sections leave of the hour.
"""

import argparse
import subprocess
import sys
import time

from benchmarks import cases
from benchmarks.peer import ROOT

TRAIN = "train"
SECTIONS: dict[str, list[str]] = {
    "cold": ["-m", "benchmarks.cold_start", "--rounds", "7"],
    "parity": ["-m", "benchmarks.parity"],
    "busy": ["-m", "benchmarks.busy_cores"],
    "demo": ["-m", "benchmarks.demo_phases", "--rounds", "2"],
    TRAIN: ["-m", "benchmarks.bench"],
}
MINUTES = 58.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Everything make bench measures.")
    parser.add_argument("--only", default="", help="sections and cases, with commas")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    asked = parser.parse_args()
    try:
        sections, chosen = choose(asked.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    began, failed = time.monotonic(), []
    for name in sections:
        command = [sys.executable, *SECTIONS[name]]
        if name == TRAIN:
            left = MINUTES - (time.monotonic() - began) / 60
            command += ["--only", chosen, "--minutes", f"{left:.1f}"]
            command += ["--fresh"] if asked.fresh else []
        print(f"\n== {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{minutes:.0f} minutes; " + (f"missed: {', '.join(failed)}" if failed else "all met"))
    return int(bool(failed))


def choose(only: str) -> tuple[list[str], str]:
    """(sections in order, cases) that a list of words selects; "" selects everything.

    Raises ValueError for a word that is neither.
    """
    words = [word.strip() for word in only.split(",") if word.strip()]
    if not words:
        return list(SECTIONS), ""
    named = [word for word in words if word not in SECTIONS]
    if named:
        try:
            cases.jobs(",".join(named))
        except ValueError as error:
            raise ValueError(f"{error}; sections: {', '.join(SECTIONS)}") from error
    sections = [name for name in SECTIONS if name in words or (name == TRAIN and named)]
    return sections, ",".join(named)


if __name__ == "__main__":
    sys.exit(main())
