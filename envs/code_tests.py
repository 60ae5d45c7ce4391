"""Run code that a model wrote against tests, in a process of its own, under limits.

The code never learns what is expected: what it returned or printed is read by this process and
compared here. So code that ends its process, prints a verdict or patches `==` gains nothing. The
code runs in a second sandbox inside that of the environment: it can read only its own folder and
the interpreter's files, and cannot start processes.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from envs.isolation import packages, sandbox

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
OUTPUT_BYTES = 1 << 20  # most output of one program; also the largest file it may write
# The runner's keeper (its first process) ends the code this much later than this process would;
# it only matters if this process is gone.
KEEPER_SECONDS = 0.5

# The program that runs the code, as two processes. The first (the keeper) ends the second when the
# time is up. The second confines itself, runs the code, evaluates `calls` and writes each result as
# a line of JSON.
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
inner_box.confine_process(job["readable"], job["writable"], keeper)
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
    """Return the share of `tests` that the Python code in `completion` passes, from 0 to 1.

    Args:
        completion: an answer; its code is the last fenced block, or all of it if there is none.
        tests: each is {"call": "add(2, 3)", "expect": 5}, where `expect` is a value that JSON can
            hold, or {"stdin": "2 3", "stdout": "5"}, compared without white space at line ends.
        timeout_s: seconds for all calls together, and for each program that is run.
        memory_mb: address space of the process, in MB.

    Code that fails, runs out of time or memory, or prints too much fails its tests without an
    exception. Raises ValueError if a test has another form, or if there are no tests.
    """
    calls = [test for test in tests if "call" in test and "expect" in test]
    programs = [test for test in tests if "stdin" in test and "stdout" in test]
    # The counts differ if a test has neither form, or both.
    if not tests or len(calls) + len(programs) != len(tests):
        raise ValueError('tests are {"call", "expect"} or {"stdin", "stdout"}, at least one')
    run = partial(_run, extract(completion), timeout_s=timeout_s, memory_mb=memory_mb)
    passed_count = _count_passed_calls(run, calls) if calls else 0  # one process for all calls
    passed_count += sum(_passes_program_test(run, test) for test in programs)
    return passed_count / len(tests)


def _passes_program_test(run: Callable[..., str], test: Mapping[str, Any]) -> bool:
    """Whether a test {"stdin", "stdout"} passes. `run` is `_run` with the code and the limits
    filled in."""
    printed = run(calls=None, stdin=str(test["stdin"]))
    return _comparable_lines(printed) == _comparable_lines(str(test["stdout"]))


def _count_passed_calls(run: Callable[..., str], tests: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tests of the form {"call", "expect"} pass.

    `run` is `_run` with the code and the limits filled in; it takes the calls and standard input.
    """
    output = run([str(test["call"]) for test in tests], stdin="")
    # One line per call; there are fewer where the code was stopped.
    return sum(
        _is_same_value(_returned_value(line), test["expect"])
        for test, line in zip(tests, output.splitlines(), strict=False)
    )


def extract(completion: str) -> str:
    """Return the content of the last fenced Python block; the whole completion if it has no such
    block."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def _run(source: str, calls: list[str] | None, stdin: str, timeout_s: float, memory_mb: int) -> str:
    """Run code in a process of its own, under limits, and return what it wrote.

    Args:
        source: the code.
        calls: expressions to evaluate after the code has run; None runs the code as a program.
        stdin: what the program reads from standard input.
        timeout_s: seconds until the process is killed.
        memory_mb: address space in MB.

    Returns:
        With `calls`, one line of JSON per call: {"value": ...} or {"error": ...}; fewer lines if
        the process was killed. Without `calls`, what the program printed; "" if it was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {"code": source, "calls": calls, **_job_limits(folder, timeout_s, memory_mb)}
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(job))
        Path(folder, "stdin").write_text(stdin)
        # Files, not pipes: their size is limited, so a flood cannot fill our memory.
        with (
            open(Path(folder, "stdin"), "rb") as input_file,
            open(Path(folder, "out"), "wb+") as output_file,
        ):
            process = _start_runner(job_file, input_file, output_file)
            has_finished = _wait_and_kill(process, timeout_s)
            output_file.seek(0)
            output = output_file.read(OUTPUT_BYTES).decode("utf-8", "replace")
        # Calls that returned before the kill count; the output of a killed program does not.
        if calls is None and not has_finished:
            return ""
        return output


def _job_limits(folder: str, timeout_s: float, memory_mb: int) -> Mapping[str, object]:
    """Return the part of the runner's job that confines the code: limits, time and reachable paths.

    Args:
        folder: the private folder in which the code runs.
        timeout_s: seconds that the code has; its keeper, the process that ends it if this process
            is gone, waits KEEPER_SECONDS longer.
        memory_mb: address space in MB.
    """
    readable, writable = sandbox.nested_paths(folder)
    return {
        "limits": {
            "RLIMIT_AS": memory_mb << 20,
            # Above `timeout_s`, so that the time limit on the wall clock ends the code first.
            "RLIMIT_CPU": math.ceil(timeout_s) + 1,
            "RLIMIT_FSIZE": OUTPUT_BYTES,
            "RLIMIT_CORE": 0,
        },
        "seconds": timeout_s + KEEPER_SECONDS,  # then the keeper ends the code
        "readable": readable,
        "writable": writable,
        "envs": str(Path(__file__).resolve().parent),
        "packages": packages.folders_on_path(),
    }


def _start_runner(
    job_file: Path, input_file: IO[bytes], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start the process that carries out the job in `job_file`, in that file's folder.

    The job says what to run, and under which limits. The process reads its standard input from
    `input_file` and writes to `output`; its standard error is discarded.
    """
    folder = str(job_file.parent)
    return subprocess.Popen(
        # -I, -S: neither variables nor packages of the user change what runs. -B: no .pyc files.
        [sys.executable, "-I", "-S", "-B", "-c", RUNNER, str(job_file)],
        stdin=input_file,
        stdout=output,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "TMPDIR": folder},
        start_new_session=True,
    )


def _wait_and_kill(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait at most `timeout_s` seconds for `process`, then kill what is left of its process group.

    Returns whether the process ended by itself.
    """
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    else:
        return True
    finally:
        # Kills the keeper and the code; the group may have ended by itself.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _returned_value(line: str) -> Any:
    """Return the value in one line of results, such as 5 for '{"value": 5}'.

    Returns the class `_Nothing`, which equals no expected value, if the call failed (then the line
    has no value), or if the line is not a result: the code may write lines of its own among them.
    """
    try:
        return json.loads(line).get("value", _Nothing)
    # ValueError: no JSON; AttributeError: no object; RecursionError: nested too deep.
    except (ValueError, AttributeError, RecursionError):
        return _Nothing


class _Nothing:
    """Stands for a call that returned no value; it equals no expected value."""


def _is_same_value(returned: Any, expected: Any) -> bool:
    """Whether a value that came back as JSON equals the expected one.

    - Numbers may differ by rounding, but True is not 1.
    - A tuple that is expected equals a list.
    - Keys are compared as text, because JSON has no others.
    """
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, int | float) and isinstance(expected, int | float):
        return math.isclose(returned, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(returned, list) and isinstance(expected, list | tuple):
        return len(returned) == len(expected) and all(map(_is_same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, Mapping):
        return _are_same_objects(returned, {str(key): value for key, value in expected.items()})
    return type(returned) is type(expected) and returned == expected


def _are_same_objects(returned: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two JSON objects have the same keys with equal values."""
    if returned.keys() != expected.keys():
        return False
    return all(_is_same_value(returned[key], value) for key, value in expected.items())


def _comparable_lines(text: str) -> list[str]:
    """Return the lines of an output, without white space at line ends and blank lines at the
    end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
