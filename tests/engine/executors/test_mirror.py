"""What is taken from another machine, and what is not."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.files import read_lines
from engine.executors import mirror as mirrors
from engine.executors.mirror import HostileFiles, Mirror
from engine.executors.ssh import FarError
from engine.home.run_dir import Home, RunDir


class FarFiles:
    """The other side: files in memory, listed and read as a connection does."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.inodes: dict[str, int] = {}
        self.reads = 0

    def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        """Write a file; with `is_new` as another file of the same name."""
        self.inodes[path] = self.inodes.get(path, 1) + is_new
        self.files[path] = data

    def look(self, **changes: Any) -> dict[str, Any]:
        """What a look answers when everything is new."""
        changed = {
            path: [len(data), self.inodes[path], hash(data) & 0xFFFF]
            for path, data in self.files.items()
        }
        return {"changed": changed, "removed": [], "best": "", **changes}

    def call(self, operation: str, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """A part of a file."""
        assert operation == "read"
        self.reads += 1
        path = arguments["path"].removeprefix("far/")
        if path not in self.files:
            raise FarError("FileNotFoundError", path)
        start = arguments["offset"]
        return {}, self.files[path][start : start + arguments["length"]]


@pytest.fixture
def run(home: Home) -> RunDir:
    run = home.run("far-1")
    run.create()
    return run


@pytest.fixture
def far() -> FarFiles:
    return FarFiles()


@pytest.fixture
def printed() -> list[bytes]:
    return []


@pytest.fixture
def mirror(run: RunDir, far: FarFiles, printed: list[bytes]) -> Mirror:
    link: Any = far
    return Mirror(run, link, "far", printed.append)


def line(step: int) -> bytes:
    return b'{"step":%d}\n' % step


def test_a_file_that_grows_comes_by_what_is_new(mirror: Mirror, far: FarFiles, run: RunDir):
    far.put("metrics.jsonl", line(0))
    mirror.take(far.look())
    far.put("metrics.jsonl", line(0) + line(1) + b'{"st')
    mirror.take(far.look())
    far.put("metrics.jsonl", line(0) + line(1) + line(2))
    mirror.take(far.look())
    assert [row["step"] for row in read_lines(run.metrics)[0]] == [0, 1, 2]
    assert far.reads == 3
    mirror.take(far.look())
    assert far.reads == 3  # nothing changed


def test_no_room_here_is_no_fault_of_the_other_machine(
    mirror: Mirror, far: FarFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirrors, "DISK_RESERVE", 1 << 60)
    far.put("metrics.jsonl", line(0))
    with pytest.raises(OSError, match="free some space") as raised:
        mirror.take(far.look())
    assert raised.value.errno == errno.ENOSPC


def test_a_file_that_was_replaced_over_there_is_replaced_here(
    mirror: Mirror, far: FarFiles, run: RunDir
):
    far.put("metrics.jsonl", line(0) + line(1) + line(2))
    mirror.take(far.look())
    far.put("metrics.jsonl", line(0) + line(7), is_new=True)
    mirror.take(far.look())
    assert [row["step"] for row in read_lines(run.metrics)[0]] == [0, 7]


@pytest.mark.parametrize("present", [line(0), line(5), b""])
def test_a_new_process_goes_on_where_the_last_one_was_cut(
    mirror: Mirror, far: FarFiles, run: RunDir, present: bytes
):
    run.metrics.write_bytes(present)  # the beginning, or of an earlier launch
    far.put("metrics.jsonl", line(0) + line(1))
    mirror.take(far.look())
    assert run.metrics.read_bytes() == line(0) + line(1)


def test_events_of_both_sides_stand_in_one_file_each_once(
    mirror: Mirror, far: FarFiles, run: RunDir
):
    ours = json.dumps({"event": "placed", "time": 1}).encode() + b"\n"
    theirs = [json.dumps({"event": f"e{n}", "time": n}).encode() + b"\n" for n in range(3)]
    run.events.write_bytes(ours + theirs[0])  # an earlier process brought the first
    ended = json.dumps({"event": "trainer_exited", "time": 9}).encode() + b"\n"
    far.put("events.jsonl", theirs[0] + theirs[1] + ended + theirs[2][:5])
    mirror.take(far.look())
    far.put("events.jsonl", theirs[0] + theirs[1] + ended + theirs[2])
    mirror.take(far.look())
    assert [row["event"] for row in read_lines(run.events)[0]] == ["placed", "e0", "e1", "e2"]


def test_the_console_is_handed_on_once_by_whatever_process(
    mirror: Mirror, far: FarFiles, printed: list[bytes], run: RunDir
):
    far.put("logs/attempt_1.log", b"one\n")
    mirror.take(far.look())
    far.put("logs/attempt_1.log", b"one\ntwo\n")
    Mirror(run, mirror.link, "far", printed.append).take(far.look())
    assert printed == [b"one\n", b"two\n"]


def checkpoint(far: FarFiles, step: int, weights: bytes, *, sha256: str = "") -> str:
    """Put a checkpoint over there; returns its name."""
    import hashlib

    name = f"step_{step:06d}"
    digest = sha256 or hashlib.sha256(weights).hexdigest()
    manifest = {"files": {"adapter_model.safetensors": {"sha256": digest}}}
    far.put(f"checkpoints/{name}/adapter_model.safetensors", weights)
    far.put(f"checkpoints/{name}/MANIFEST.json", json.dumps(manifest).encode())
    return name


def test_a_checkpoint_comes_complete_or_not_at_all(mirror: Mirror, far: FarFiles, run: RunDir):
    first = checkpoint(far, 1, b"w" * 100)
    far.put("checkpoints/step_000002/adapter_model.safetensors", b"half")  # no manifest yet
    mirror.take(far.look(best=first))
    assert run.checkpoint_steps() == [1]
    assert run.resolve_checkpoint("best") == run.checkpoint(1)
    assert [path.name for path in run.checkpoints.iterdir() if path.name[0] == "s"] == [first]
    with pytest.raises(HostileFiles, match="manifest"):
        checkpoint(far, 3, b"other", sha256="0" * 64)
        mirror.take(far.look())
    assert run.checkpoint_steps() == [1]


def test_a_checkpoint_that_the_trainer_deleted_goes_here_too(
    mirror: Mirror, far: FarFiles, run: RunDir
):
    gone, kept = checkpoint(far, 1, b"a"), checkpoint(far, 2, b"b")
    mirror.take(far.look(best=kept))
    removed = [path for path in far.files if gone in path]
    for path in removed:
        del far.files[path]
    mirror.take(far.look(removed=removed, best=kept))
    assert run.checkpoint_steps() == [2]


HOSTILE = [
    "../../escape.jsonl",
    "rollouts/../../escape.jsonl",
    "/etc/cron.d/escape",
    "rollouts/step_000001.jsonl\n",
    "rollouts/step_000001.jsonl/x",
    "evals/model_0.jsonl\x00",
    "checkpoints/step_000001/../../../escape",
    "checkpoints/step_000001/.hidden/../x",
    "metrics.jsonl.py",
    "runs",
    "",
]


@pytest.mark.parametrize("path", HOSTILE)
def test_a_name_that_no_run_writes_is_refused(
    mirror: Mirror, far: FarFiles, run: RunDir, path: str
):
    before = sorted(run.home.root.rglob("*"))
    far.put(path, b"x")
    assert mirror.take(far.look()) == [path]
    assert mirror.take(far.look()) == []  # said once
    assert sorted(run.home.root.rglob("*")) == before


def test_the_records_of_the_other_side_stay_there(mirror: Mirror, far: FarFiles, run: RunDir):
    run.exit_record.write_text("ours")
    for name in ("config.json", "exit.json", "started.json", "STATUS.md", "lease.json"):
        far.put(name, b"theirs")
    assert mirror.take(far.look()) == []
    assert run.exit_record.read_text() == "ours" and not run.config.exists()


def test_nothing_is_written_through_a_link(mirror: Mirror, far: FarFiles, run: RunDir):
    outside = run.home.root / "outside"
    outside.write_text("kept")
    run.metrics.symlink_to(outside)
    far.put("metrics.jsonl", line(0))
    mirror.take(far.look())
    assert outside.read_text() == "kept"
    assert not run.metrics.is_symlink() and run.metrics.read_bytes() == line(0)


@pytest.mark.parametrize(
    "facts", [[9 << 30, 1, 1], [-1, 1, 1], ["1", 1, 1], [1, 1], None, [True, 1, 1]]
)
def test_a_size_that_no_run_writes_ends_it(mirror: Mirror, run: RunDir, facts: Any):
    with pytest.raises(HostileFiles):
        mirror.take({"changed": {"metrics.jsonl": facts}, "removed": []})
    assert not run.metrics.exists()


def test_more_files_than_any_run_has_end_it(mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirrors, "MOST_FILES", 3)
    changed = {f"rollouts/step_{n:06d}.jsonl": [0, 1, 1] for n in range(4)}
    with pytest.raises(HostileFiles, match="more than 3 files"):
        mirror.take({"changed": changed, "removed": []})


def test_what_does_not_fit_on_the_disk_is_not_begun(
    mirror: Mirror, far: FarFiles, run: RunDir, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirrors, "DISK_RESERVE", 1 << 60)
    far.put("metrics.jsonl", line(0))
    with pytest.raises(OSError, match="free here") as refusal:
        mirror.take(far.look())
    assert refusal.value.errno == errno.ENOSPC, "tried again; it does not stop the run over there"
    assert not run.metrics.exists()


@pytest.mark.parametrize("answer", [{}, {"changed": [], "removed": {}}, {"changed": {1: 2}}])
def test_an_answer_of_another_form_changes_nothing(mirror: Mirror, run: RunDir, answer: Any):
    mirror.take(answer)
    assert [path for path in Path(run.path).rglob("*") if path.is_file()] == []
