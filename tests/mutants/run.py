"""Plants every fault of faults.py in a copy of the tree and demands that its tests fail, by their
assertions: `make mutants`. Words of fault names as arguments choose among them.

The heavy libraries are imported once; each fault is tried in a forked process with its own copy of
the engine. A fault counts as caught only if everything still imports, every named test is
collected, and each fails in its body by an assertion and in no other way. The tests are run on an
unchanged copy first and must pass there.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ |= {"GOMP_SPINCOUNT": "10000", "TOKENIZERS_PARALLELISM": "false"}

import hypothesis  # noqa: E402, F401
import peft  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402, F401
import transformers.models.gpt2.modeling_gpt2  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.models.mistral.modeling_mistral  # noqa: E402
import transformers.models.qwen2.modeling_qwen2  # noqa: E402
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.fault import Fault  # noqa: E402
from tests.mutants.faults import FAULTS  # noqa: E402

LIMIT_S = 300  # of one fault


class Recorder:
    """What became of each test, as pytest tells its plugins."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.broken: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:  # a slow machine is no finding
            item.add_marker(pytest.mark.timeout(LIMIT_S), append=False)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid}: {str(report.longrepr)[-300:]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if call.when == "call" and report.passed:
            self.outcomes[item.nodeid] = "passed"
        elif call.when == "call" and report.failed and _by_assertion(call.excinfo.value):
            self.outcomes[item.nodeid] = "assertion"
        elif report.failed:
            self.outcomes[item.nodeid] = f"{call.when}: {call.excinfo.typename}"
        return report


def _by_assertion(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):  # hypothesis found more than one way
        return all(_by_assertion(inner) for inner in error.exceptions)
    if isinstance(error, pytest.fail.Exception):
        return not str(error).startswith("Timeout")
    return isinstance(error, AssertionError)


def copy_tree(folder: Path) -> None:
    """The tree as the tests need it; what is large and never mutated is linked."""
    for name in ("engine", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("pebble"))
    for name in ("engine/pebble", "envs", "playbook", "mcp_server", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)


def plant(fault: Fault, folder: Path) -> None:
    file = folder / fault.path
    source = file.read_text("utf-8")
    if source.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: its text does not stand exactly once in {fault.path}")
    file.write_text(source.replace(fault.old, fault.new), "utf-8")


def run_tests(folder: Path, ids: Sequence[str]) -> None:
    """In a forked process: run the tests of this copy and leave the outcomes in it."""
    os.chdir(folder)
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the list of faults came from the tree itself, the tests must not
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    (folder / "tmp").mkdir()
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        recorder = Recorder()
        options = ["-p", "no:cacheprovider", "--tb=short"]
        pytest.main([*options, *ids], plugins=[recorder])
        found = {"outcomes": recorder.outcomes, "broken": recorder.broken}
        (folder / "result.json").write_text(json.dumps(found))


def start(folder: Path, fault: Fault | None, ids: Sequence[str]) -> int:
    """Fork a process that tries one fault, or none; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        copy_tree(folder)
        if fault is not None:
            plant(fault, folder)
        run_tests(folder, ids)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must never return into the parent
        traceback.print_exc()
        code = 1
    os._exit(code)


def judge(folder: Path, ids: Sequence[str], wanted: str) -> str:
    """Why the outcome is not the wanted one ("assertion" or "passed"); "" when it is."""
    result = folder / "result.json"
    if not result.exists():
        log = folder / "log"
        return "no result: " + (log.read_text()[-300:] if log.exists() else "it ended early")
    found = json.loads(result.read_text())
    if found["broken"]:
        return f"does not import: {found['broken'][0]}"
    for test in ids:
        mine = [
            outcome
            for node, outcome in found["outcomes"].items()
            if node == test or ("[" not in test and node.startswith(test + "["))
        ]
        others = [o for o in mine if o not in ("passed", "assertion")]
        name = test.partition("::")[2]
        if not mine:
            return f"not collected: {name}"
        if others:
            return f"{others[0]}: {name}"
        if wanted == "assertion" and "assertion" not in mine:
            return f"SURVIVES {name}"
        if wanted == "passed" and set(mine) != {"passed"}:
            return f"fails unchanged: {name}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="words of the faults to try; all by default")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    faults = [f for f in FAULTS if all(w in f.name for w in arguments.words)]
    began = time.monotonic()
    width = max(len(f.name) for f in faults)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        every = list(dict.fromkeys(test for f in faults for test in f.ids))
        print(f"{len(every)} tests on the unchanged tree ...", flush=True)
        whole = Path(place, "unchanged")
        whole.mkdir()
        os.waitpid(start(whole, None, every), 0)
        if why := judge(whole, every, "passed"):
            print(f"The unchanged tree: {why}", file=sys.stderr)
            print((whole / "log").read_text()[-3000:] if (whole / "log").exists() else "")
            return 1
        shutil.rmtree(whole)
        waiting = list(enumerate(faults))
        running: dict[int, tuple[Fault, Path, float]] = {}
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                number, fault = waiting.pop(0)
                folder = Path(place, str(number))
                folder.mkdir()
                pid = start(folder, fault, fault.ids)
                running[pid] = fault, folder, time.monotonic()
            pid, _ = os.wait()
            if pid not in running:
                continue
            fault, folder, started = running.pop(pid)
            why = judge(folder, fault.ids, "assertion")
            bad += bool(why)
            seconds = time.monotonic() - started
            print(f"{fault.name:{width}}  {seconds:5.1f} s  {why or 'caught'}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    took = time.monotonic() - began
    print(f"{len(faults) - bad} of {len(faults)} faults caught, {took:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
