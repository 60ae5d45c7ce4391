"""Lines of a run's files are read as typed records, and written as they were read."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from run_configs import MANIFEST

from engine.records.lines.answer import Answer
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.event import Event, read_events
from engine.records.lines.line_record import LineRecord
from engine.records.lines.metrics_line import MetricsLine, read_metrics
from engine.records.lines.trajectory_record import TrajectoryRecord, read_trajectories
from engine.records.manifest import Manifest, read_manifest
from engine.records.record import DamagedRecord

GOLDEN = Path(__file__).parents[3] / "faults" / "golden" / "0.1.0" / "runs" / "sums-grpo-1"
ANSWER: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "messages": [{"role": "assistant", "content": "4"}],
    "completion": "4",
    "reward": 1.0,
    "success": True,
    "metrics": {"short": 1.0},
    "error": None,
    "stop_reason": "stop",
    "tokens": 2,
}
PLACE: dict[str, Any] = {"model": "sums-grpo-1", "task": "2+2", "half": "select", "attempt": 0}
TRAJECTORY: dict[str, Any] = (
    {"step": 3, "task": "2+2", "group": 0, "member": 1}
    | ANSWER
    | {"advantage": 0.5, "turns": 1, "policy_step": 2}
)
SKILL: dict[str, Any] = {
    "model": "sums-grpo-1",
    "task": "copy-0",
    "battery": "pebble skills",
    "family": "copy",
    "prompt": ANSWER["prompt"],
    "completion": "4",
    "reward": 0.0,
    "success": False,
    "error": None,
    "stop_reason": "max_tokens",
    "tokens": 24,
}
LINES: list[tuple[type[LineRecord], dict[str, Any]]] = [
    (TrajectoryRecord, TRAJECTORY),
    (EvaluationRow, PLACE | ANSWER | {"stop_reason": "timeout", "invalid_calls": ["turn 1: x"]}),
    (TrajectoryRecord, TRAJECTORY | {"shaped_reward": 0.75, "dropped": True, "prompt_ids": [1]}),
    (EvaluationRow, PLACE | ANSWER),
    (EvaluationRow, PLACE | ANSWER | {"battery": "keep@0123", "family": ""}),
    (EvaluationRow, PLACE | {"loss": 1.5, "tokens": 3, "error": None}),
    (EvaluationRow, SKILL),
    (Event, {"time": 1.5, "event": "alert", "message": "m", "step": 3, "numbers": {"a": [1, 2]}}),
    (MetricsLine, {"step": 1, "time": 1.5, "reward_mean": 0.5, "microbatches": 2, "kl": None}),
]


@pytest.mark.parametrize(("kind", "line"), LINES)
def test_a_line_is_written_as_it_was_read(kind: type[LineRecord], line: dict[str, Any]):
    assert json.dumps(kind.of(line, "file").to_line()) == json.dumps(line)


def test_the_lines_of_an_older_version_are_read_whole():
    assert [line.step for line in read_metrics(GOLDEN / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    events = read_events(GOLDEN / "events.jsonl")
    stored = [json.loads(line) for line in (GOLDEN / "events.jsonl").read_text().splitlines()]
    assert [event.to_line() for event in events] == stored
    assert [event.step for event in events if event.event == "checkpoint"] == [2, 4]


WITHOUT_A_KEY: list[tuple[type[LineRecord], dict[str, Any], str]] = [
    (TrajectoryRecord, TRAJECTORY, "advantage"),
    (EvaluationRow, PLACE | ANSWER, "model"),
    (Event, {"time": 1.5, "event": "done"}, "event"),
    (MetricsLine, {"step": 1, "time": 1.5}, "step"),
]


@pytest.mark.parametrize(("kind", "line", "key"), WITHOUT_A_KEY)
def test_a_line_without_a_key_names_it(kind: type[LineRecord], line: dict[str, Any], key: str):
    rest = {name: value for name, value in line.items() if name != key}
    with pytest.raises(DamagedRecord, match=rf"lines\.jsonl is damaged: {key}: field required"):
        kind.of(rest, "lines.jsonl")


@pytest.mark.parametrize(("kind", "line", "key"), WITHOUT_A_KEY)
def test_damaged_lines_are_skipped_and_counted(
    tmp_path: Path, kind: type[LineRecord], line: dict[str, Any], key: str
):
    path, whole = tmp_path / "lines.jsonl", json.dumps(line)
    rest = json.dumps({name: value for name, value in line.items() if name != key})
    path.write_text(f'{whole}\n{rest}\n[1, 2]\n{{"torn": \n\n{whole}\n{whole[:-9]}')
    read = kind.read_file(path)
    assert [record.to_line() for record in read.records] == [line, line]
    assert read.skipped == 3  # the last line is still being written
    assert kind.read_all(path) == read.records


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path):
    assert read_trajectories(tmp_path / "none.jsonl") == []


def test_text_that_is_no_unicode_passes():
    line = TRAJECTORY | {"completion": "\ud800", "error": "\udfff"}
    assert TrajectoryRecord.of(line, "file").to_line() == line


def test_a_metric_that_is_no_number_has_no_value():
    line = MetricsLine.of({"step": 1, "time": 0.0, "loss": math.nan, "model": "m", "lr": 1}, "")
    assert [line.value(name) for name in ("loss", "model", "lr", "x")] == [None, None, 1.0, None]


REPLAYED = {"share": 0.2, "source": "pebble skills", "rows": 767, "questions": 800, "opposed": 0}
REPLAYED |= {"beside": REPLAYED | {"source": "keep@1a", "questions": None, "beside": None}}
MANIFEST_WITH_REPLAY = {
    **MANIFEST,
    "model": {**MANIFEST["model"], "others": []},
    "replayed": REPLAYED,
    "shared_texts": ["tools"],
    "switched_off": {"decode_graph": "slower: 3 ms, the plain way 2 ms"},
    "judges": [],
}


def test_a_manifest_is_written_as_it_was_read(tmp_path: Path):
    path = tmp_path / "manifest.json"
    Manifest.model_validate(MANIFEST_WITH_REPLAY).write(path)
    assert path.read_text() == json.dumps(MANIFEST_WITH_REPLAY, indent=1) + "\n"
    assert read_manifest(path).model.files == {"config.json": "00"}
    path.write_text(json.dumps({k: v for k, v in MANIFEST_WITH_REPLAY.items() if k != "precision"}))
    with pytest.raises(DamagedRecord, match=r"manifest\.json is damaged: precision"):
        read_manifest(path)


def test_a_metric_that_was_no_number_is_left_out_and_the_rest_is_read():
    row = {"task": "a", "metrics": {"length": 3, "ratio": None}}
    assert Answer.of(row, "rollouts").metrics == {"length": 3.0}


@pytest.mark.parametrize(
    ("written", "read", "cut"),
    [
        ("length", "max_tokens", True),
        ("error", "env_error", False),
        ("max_turns", "max_turns", True),
        ("max_context", "max_context", True),
        ("stop", "stop", False),
        ("a later word", "a later word", False),
        (None, None, False),
    ],
)
def test_stop_reasons_of_earlier_versions_are_read_as_those_of_today(
    written: str | None, read: str | None, cut: bool
) -> None:
    answer = Answer.of({"task": "a", "stop_reason": written}, "rollouts")
    assert (answer.stop_reason, answer.cut) == (read, cut)
