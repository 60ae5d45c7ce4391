"""An audit of every row goes on where it was killed, and finds what one in one go finds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs.audit.full_audit import FullAudit
from envs.base import Task
from envs.json_types import ScoreReply

ROWS = [
    Task(str(n), f"What is {n} and {n}?", str(2 * n), metadata={"n": n}).to_row() for n in range(9)
]
CLOCKS = ("seconds", "score_seconds_p95")


class Exact:
    """Pays the reference answer, and on the last row everything."""

    def __init__(self) -> None:
        self.tasks: list[str] = []

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply:
        self.tasks.append(task["id"])
        right = completion == str(2 * task["metadata"]["n"]) or task["id"] == "8"
        return {
            "reward": float(right),
            "success": right,
            "metrics": {},
            "error": None,
            "seconds": 0.0,
        }

    def start(self, task: Mapping[str, Any]) -> Any:
        raise NotImplementedError


class Killed(Exception):
    pass


def report(file: Path, **options: Any) -> Any:
    return FullAudit(ROWS, "single", file, **options).run([Exact(), Exact()], Exact, lambda: 0.0)


def test_every_row_is_scored_so_one_bad_row_is_seen(tmp_path: Path):
    found = report(tmp_path / "rows.jsonl")
    assert (found["rows_scored"], found["share"]) == (9, 1.0)
    assert "(9 of 9 rows scored)" in found["headline"]
    by_probe = {line["probe"]: line for line in found["probes"]}
    assert by_probe["gold"]["mean"] == 1.0 and by_probe["empty"]["paid"] == round(1 / 9, 4)
    assert by_probe["empty"]["rows"] == 9
    assert found["fresh_process"]["scored"] == 9 and found["fresh_process"]["differing"] == 0


def test_a_killed_audit_goes_on_and_finds_the_same(tmp_path: Path):
    def kill(done: int) -> None:
        if done == 4:
            raise Killed

    file = tmp_path / "rows.jsonl"
    with pytest.raises(Killed):
        report(file, on_row=kill)
    kept = FullAudit(ROWS, "single", file).findings_by_row()
    assert 4 <= len(kept) < 9
    with file.open("a") as torn:
        torn.write('{"row": 8, "findi')  # as a kill in the middle of a write leaves it
    scorer = Exact()
    resumed = FullAudit(ROWS, "single", file).run([scorer], Exact, lambda: 0.0)
    assert not set(scorer.tasks) & {str(row) for row in kept}
    whole = report(tmp_path / "whole.jsonl")
    assert {k: v for k, v in resumed.items() if k not in CLOCKS} == {
        k: v for k, v in whole.items() if k not in CLOCKS
    }
