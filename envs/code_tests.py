"""Code that a model wrote is run against tests in a process of its own, under limits.

The code never learns what is expected: it runs, what it returned or printed is read outside, and
compared there. Code that ends the process, prints a verdict or patches `==` gains nothing. Around
it is a second box: it reads its own folder and the interpreter's, and starts no process.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.isolation import packages, sandbox

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
OUTPUT_BYTES = 1 << 20
KEEPER_SECONDS = 0.5  # what the keeper waits longer than we do

# Two processes: the first keeps time and ends the second, which shuts itself into a box of its own
# and runs the code; `calls` are evaluated there and what they give is written as JSON.
RUNNER = r"""
import importlib.util, json, os, resource, signal, sys
job = json.load(open(sys.argv[1]))
for name, value in job["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
spec = importlib.util.spec_from_file_location(
    "envs", job["envs"] + "/__init__.py", submodule_search_locations=[job["envs"]])
sys.modules["envs"] = importlib.util.module_from_spec(spec)
from envs.isolation import inner_box
keeper = os.getpid()
if pid := os.fork():
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    os._exit(1 if os.waitpid(pid, 0)[1] else 0)
inner_box.close(job["readable"], job["writable"], keeper)
for name in [name for name in sys.modules if name.split(".")[0] == "envs"]:
    del sys.modules[name]
del inner_box
sys.path += job["packages"]
results = os.fdopen(os.dup(1), "w")
if job["calls"] is not None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
scope = {"__name__": "__main__"}
exec(compile(job["code"], "answer.py", "exec"), scope)
for call in job["calls"] or []:
    try:
        line = json.dumps({"value": eval(call, scope)})
    except BaseException as error:
        line = json.dumps({"error": type(error).__name__})
    results.write(line + "\n")
    results.flush()
"""


def code(
    completion: str,
    tests: Sequence[Mapping[str, Any]],
    *,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
) -> float:
    """The share of `tests` that the Python code in `completion` passes.

    Args:
        completion: its last fenced block, or all of it where there is none.
        tests: either {"call": "add(2, 3)", "expect": 5}, a value JSON can hold, or
            {"stdin": "2 3", "stdout": "5"}, compared without white space at line ends.
        timeout_s: for all calls together, and for each program run.
        memory_mb: address space.

    Raises ValueError for a test of another form, or none.
    """
    calls = [test for test in tests if "call" in test and "expect" in test]
    programs = [test for test in tests if "stdin" in test and "stdout" in test]
    if not tests or len(calls) + len(programs) != len(tests):
        raise ValueError('tests are {"call", "expect"} or {"stdin", "stdout"}, at least one')
    text = extract(completion)
    passed = 0
    if calls:
        given = _run(text, [str(test["call"]) for test in calls], "", timeout_s, memory_mb)
        for test, line in zip(calls, given.splitlines(), strict=False):
            passed += _equal(_value(line), test["expect"])
    for test in programs:
        printed = _run(text, None, str(test["stdin"]), timeout_s, memory_mb)
        passed += _lines(printed) == _lines(str(test["stdout"]))
    return passed / len(tests)


def extract(completion: str) -> str:
    """The last fenced Python block of a completion, or all of it."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def _run(text: str, calls: list[str] | None, stdin: str, timeout_s: float, memory_mb: int) -> str:
    """The output of the program; "" when it ran out of time."""
    limits = {
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_CPU": math.ceil(timeout_s) + 1,
        "RLIMIT_FSIZE": OUTPUT_BYTES,
        "RLIMIT_CORE": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        readable, writable = sandbox.inside(folder)
        job = Path(folder, "job.json")
        order = {
            "code": text,
            "calls": calls,
            "limits": limits,
            "seconds": timeout_s + KEEPER_SECONDS,
            "readable": readable,
            "writable": writable,
            "envs": str(Path(__file__).resolve().parent),
            "packages": packages.on_path(),
        }
        job.write_text(json.dumps(order))
        Path(folder, "stdin").write_text(stdin)
        # Files, not pipes: their size is limited, so a flood cannot fill our memory.
        with open(Path(folder, "stdin"), "rb") as given, open(Path(folder, "out"), "wb+") as out:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", RUNNER, str(job)],
                stdin=given,
                stdout=out,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "TMPDIR": folder},
                start_new_session=True,
            )
            try:
                process.wait(timeout_s)
                finished = True
            except subprocess.TimeoutExpired:
                finished = False
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            printed = out.read(OUTPUT_BYTES).decode("utf-8", "replace")
            # Calls that came back before the hang count; half a program's output does not.
            return printed if finished or calls is not None else ""


def _value(line: str) -> Any:
    try:
        return json.loads(line).get("value", _Nothing)
    except (ValueError, AttributeError, RecursionError):
        return _Nothing


class _Nothing:
    """Stands for a call that returned no value; not equal to any other value."""


def _equal(given: Any, expected: Any) -> bool:
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        return math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(given, list) and isinstance(expected, list | tuple):
        return len(given) == len(expected) and all(map(_equal, given, expected))
    if isinstance(given, dict) and isinstance(expected, Mapping):
        keys = {str(key): value for key, value in expected.items()}
        return given.keys() == keys.keys() and all(_equal(given[k], keys[k]) for k in keys)
    return type(given) is type(expected) and given == expected


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
