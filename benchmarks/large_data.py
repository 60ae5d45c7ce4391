"""Gigabytes of rows: inspected, refused by line, pushed, sampled from, with what memory?

    python -m benchmarks.large_data FOLDER [--rows 5000000] [--home DIR]

Writes a JSONL file of about 490 bytes a row into FOLDER, with a fault of each kind planted at a
known line: `data inspect` and `env push` must name every planted line. Then the faults are mended,
the folder is pushed, and rows of it are read at random places. Prints seconds and peak memory of
each command, the processes below it included. Exits 1 where a line is not named or the memory is
above 500 MB.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.processes import family, peak_bytes

LIMIT_MB = 500
ANSWER_WORDS = 55  # makes a row about 490 bytes long
# What is written in place of a row, by the share of the file at which it stands.
FAULTS = {
    0.1: '{"prompt": "no closing brace", "completion": "x"',
    0.3: "[1, 2, 3]",
    0.5: '{"prompt": "", "completion": "x"}',
    0.7: '{"text": "to be continued"}',
    0.9: '{"prompt": "\\ud800", "completion": 5}',
}
# Reads rows of the pushed version as training does, at random places.
SAMPLING = """
import random, sys
from pathlib import Path
from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home
home = Home.locate(Path(sys.argv[1]))
rows = read_tasks(find_env(home, "large"), "train")
drawn = random.Random(0).sample(range(len(rows)), 20_000)
read = [rows[place] for place in drawn]
print(len(read), "rows drawn of", len(rows), "such as", read[0]["prompt"][0]["content"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--home", type=Path, help="FOLDER/home unless given")
    asked = parser.parse_args()
    home = asked.home or asked.folder / "home"
    file = asked.folder / "large" / "datasets" / "train.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    planted = {int(share * asked.rows) + 1: text for share, text in FAULTS.items()}
    write(file, asked.rows, planted)
    print(f"{file.stat().st_size / 1e9:.2f} GB, {asked.rows} rows, faults in lines {[*planted]}")
    missed, peaks = [], []
    cli = ["-m", "mcp_server.cli"]
    in_home = ["--home", str(home)]
    push = [*cli, "env", "push", str(file.parents[1]), *in_home]
    for command in ([*cli, "data", "inspect", str(file), *in_home], push):
        _, text, peak = run(command)
        peaks.append(peak)
        missed += [line for line in planted if not names_line(text, line)]
    write(file, asked.rows, {})
    code, text, peak = run(push)
    print(text.splitlines()[0] if text else "nothing was printed")
    sampled, text, reading_peak = run(["-c", SAMPLING, str(home)])
    print(text.strip())
    highest = max(*peaks, peak, reading_peak)
    print(json.dumps({"missed_lines": missed, "highest_mb": round(highest, 1), "push": code}))
    return int(bool(missed) or code != 0 or sampled != 0 or highest > LIMIT_MB)


def write(file: Path, rows: int, planted: dict[int, str]) -> None:
    """Write rows of words; in the lines that are keys of `planted` its texts instead."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=7)) for _ in range(2000)]
    with file.open("w", encoding="utf-8") as output:
        for number in range(1, rows + 1):
            answer = " ".join(rng.choices(words, k=ANSWER_WORDS))
            row = f'{{"prompt": "Question {number}?", "completion": "{answer}"}}'
            output.write(planted.get(number, row) + "\n")


def names_line(text: str, line: int) -> bool:
    """Whether an output names a line, as "line 500001" or "line: 500001"."""
    return re.search(rf"\bline:? {line}\b", text) is not None


def run(arguments: list[str]) -> tuple[int, str, float]:
    """Run Python: (exit status, what it printed, peak memory in MB of its largest process)."""
    began = time.monotonic()
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = 0
    while process.poll() is None:
        peak = max([peak, *(peak_bytes(pid) for pid in family(process.pid))])
        time.sleep(0.2)
    assert process.stdout is not None
    text = process.stdout.read()
    seconds = time.monotonic() - began
    named = "sampling" if arguments[0] == "-c" else " ".join(arguments[2:4])
    used = f"{seconds:.0f} s, {peak / 2**20:.0f} MB"
    print(f"{named}: {used}, status {process.returncode}", flush=True)
    return process.returncode, text, peak / 2**20


if __name__ == "__main__":
    sys.exit(main())
