"""Holds a run that was trained elsewhere against one of the same settings that was trained here."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.core.files import read_json
from engine.evidence.verdict.provenance import verify
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import submit

# What a clock, the load of a machine, or its own paths say.
MEASURED = re.compile(
    r"time|mfu|memory|measured|(.*_)?(s|seconds|hours)|.*per_s|.*share_of|.*(util|memory)"
)
_LINES = ("metrics.jsonl", "rollouts/*.jsonl", "evals/*.jsonl")


def plain(value: Any) -> Any:
    """A value without what was measured of the machine."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if not MEASURED.fullmatch(key)}
    return [plain(each) for each in value] if isinstance(value, list) else value


def content(run: RunDir) -> dict[str, Any]:
    """What a run left, by file: its lines and its result field by field, without its name and what
    was measured; the weights byte by byte."""

    def without_name(text: str) -> Any:
        return plain(json.loads(text.replace(run.id, "the run")))

    contents: dict[str, Any] = {}
    for path in (path for pattern in _LINES for path in sorted(run.path.glob(pattern))):
        lines = [without_name(line) for line in path.read_text().splitlines()]
        contents[str(path.relative_to(run.path))] = lines
    contents["result.json"] = without_name(run.result.read_text())
    for path in sorted(run.checkpoints.glob("step_*/adapter_model.safetensors")):
        contents[str(path.relative_to(run.path))] = path.read_bytes()
    return contents


def trained_here_and_there(
    home: Home, request: Callable[[str], TrainRequest], compute: str, until: Callable[..., Any]
) -> list[RunDir]:
    """Train `request` of "local" and of another place, one after the other; returns both runs."""
    runs = []
    for place in ("local", compute):
        run = home.run(str(submit(home, request(place))["run_id"]))

        def ended(run: RunDir = run) -> bool:
            with Store(home) as store:
                row = store.get_run(run.id)
            return row.state in TERMINAL and not launcher.is_alive(run)

        until(ended, 1500.0)
        runs.append(run)
    return runs


def assert_same(home: Home, here: RunDir, there: RunDir, compute: str) -> None:
    """Fail where the run from `compute` is not the run from here."""
    with Store(home) as store:
        rows = [store.get_run(run.id) for run in (here, there)]
    assert [row.state for row in rows] == ["done", "done"], rows
    assert rows[0].verdict == rows[1].verdict and rows[1].device == compute
    ours, theirs = content(here), content(there)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == theirs[name], name
    algorithm = read_json(here.config)["algorithm"]
    assert len(ours["metrics.jsonl"]) > 2, "a run of some steps"
    assert any(name.startswith("evals/") for name in ours)
    assert any(name.startswith("rollouts/") for name in ours) == (algorithm == "grpo")
    assert any(Path(name).suffix == ".safetensors" for name in ours)
    assert here.checkpoint_steps() == there.checkpoint_steps()
    assert here.best.readlink() == there.best.readlink()
    assert verify(home, there.id).intact is True
