"""`make quick`: lint, types, contracts and the tests nearest to what was changed, in under a minute
on two idle cores.

What was changed is asked of git: files that differ from the last commit, and new ones. A changed
module stands for the tests of its folder (those named after it first), a changed test file for
itself, a shared helper for the tests that import it. Without a change a core of the suite runs.
Left to `make test`: tests that start a torch worker or drive whole runs, and what the time does not
allow; how many those were is printed.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PACKAGES = ("mcp_server", "playbook", "engine", "envs", "benchmarks")
TESTS_S = 25.0  # after this no further test starts
NOT_QUICK = (
    "worker",
    "e2e",
    "faults",
    "adapters",
    "clients",
    "browser",
    "vllm",
    "bench",
    "scale",
    "machines",
    "evidence",
)

CHECKS = {
    "types": ("pyright",),
    "lint": ("ruff", "check", "--quiet", "."),
    "format": ("ruff", "format", "--check", "--quiet", "."),
    "contracts": ("lint-imports",),
}
# Of the tree as a whole: always run.
TREE = ("tests/test_architecture.py", "tests/test_docs.py")
# What holds most of the rest up, and takes little time.
CORE = (
    "tests/engine/core",
    "tests/engine/home",
    "tests/engine/records",
    "tests/engine/settings",
    "tests/engine/evidence/stats",
    "tests/envs/test_base.py",
    "tests/envs/test_rewards.py",
    "tests/mcp_server/api",
    "tests/mcp_server/protocol/test_tools.py",
    "tests/playbook",
)


def changed_files() -> list[Path]:
    """Files that differ from the last commit or are new, deleted ones included; relative."""

    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"make quick asks git what was changed: {done.stderr.strip()}")
        return done.stdout.splitlines()

    differing = lines("diff", "--name-only", "--no-renames", "HEAD")
    new = lines("ls-files", "--others", "--exclude-standard")
    return sorted({Path(name) for name in differing + new})


def tests_of(path: Path) -> list[Path]:
    """The test files and folders that a changed file stands for, the nearest first."""
    top = path.parts[0]
    if top == "tests":
        return _tests_of_a_test(path)
    if top not in PACKAGES:
        return []
    folder = Path("tests") / path.parent
    while not (ROOT / folder).is_dir():  # what lies in data folders: the package they belong to
        folder = folder.parent
    named = sorted((ROOT / folder).glob(f"test_{path.stem}.py"))
    named += sorted((ROOT / folder).glob(f"test_{path.stem}_*.py"))
    return [*(each.relative_to(ROOT) for each in named), *_files_in(folder)]


def _tests_of_a_test(path: Path) -> list[Path]:
    if path.name.startswith("test_") and path.suffix == ".py":
        return [path] if (ROOT / path).exists() else []
    if path.name == "conftest.py" and path.parent != Path("tests"):
        return _files_in(path.parent)
    used = re.compile(rf"\b(from|import) (\w+\.)*{re.escape(path.stem)}\b")
    return [each for each in _files_in(Path("tests")) if used.search((ROOT / each).read_text())]


def _files_in(folder: Path) -> list[Path]:
    """The test files directly in a folder; of `tests` itself all there are."""
    every = (ROOT / folder).glob("**/test_*.py" if folder == Path("tests") else "test_*.py")
    return sorted(each.relative_to(ROOT) for each in every)


def chosen() -> tuple[str, list[str]]:
    """(why these, the test files and folders to run)."""
    changed = changed_files()
    selected = [test for path in changed for test in tests_of(path)]
    if not selected:
        return "nothing with tests of its own was changed: a core of the suite", [*CORE, *TREE]
    named = ", ".join(str(path) for path in changed[:6])
    more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
    return f"the tests nearest to {named}{more}", _once([*map(str, selected), *TREE])


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _listed(tests: list[str]) -> str:
    """The files by folder, a line each."""
    folders: dict[str, list[str]] = {}
    for test in tests:
        path = Path(test)
        folders.setdefault(str(path.parent if path.suffix else path), []).append(path.name)
    return "\n".join(
        f"  {folder}/ {' '.join(name for name in names if name.endswith('.py'))}"
        for folder, names in folders.items()
    )


def main() -> int:
    start = time.monotonic()
    why, tests = chosen()
    checks = {
        name: subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, command in CHECKS.items()
    }
    print(f"{', '.join(CHECKS)}; {why}:\n{_listed(tests)}", flush=True)
    markers = " and ".join(f"not {marker}" for marker in NOT_QUICK)
    options = ["-n", "2", "--dist", "loadfile", "-p", "quick_deadline", "-rs", "-m", markers]
    variables = os.environ | {
        "PYTHONPATH": str(ROOT / "tests/helpers"),
        "QUICK_SECONDS": str(TESTS_S),
    }
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=variables
    ).returncode
    failed = []
    for name, check in checks.items():
        output, _ = check.communicate()
        if check.returncode:
            failed.append(name)
            print(f"--- {name} ---", output, sep="\n")
    if tested not in (0, 5):  # 5: every test of these files is left to make test
        failed.append("tests")
    outcome = f"failed: {', '.join(failed)}" if failed else "all passed"
    print(f"make quick: {outcome}, {time.monotonic() - start:.0f} s. The whole suite: make test")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
