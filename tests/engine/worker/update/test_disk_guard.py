"""Room for the next checkpoint: made where others may go, refused where not."""

import pytest

from engine.core.files import write_json
from engine.home.owner_marks import write_pinned
from engine.home.run_dir import Home, RunDir
from engine.worker.core.failures import WorkerFailure
from engine.worker.update import checkpoint, disk_guard

EACH = 1_000_000  # bytes of a checkpoint


@pytest.fixture
def run(home: Home) -> RunDir:
    """A run with the checkpoints of steps 10 to 50."""
    run = home.run("a-sft-1")
    run.create()
    for step in range(10, 60, 10):
        folder = run.checkpoint(step)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes(EACH))
        write_json(folder / checkpoint.MANIFEST, {"step": step})
    return run


@pytest.fixture
def disk(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    """Makes the disk as large as a number of bytes; what the run has on it is taken off."""

    def resize(capacity: int) -> None:
        def free(_: RunDir) -> int:
            used = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
            return max(0, capacity - used)

        monkeypatch.setattr(disk_guard, "free_bytes", free)

    return resize


def test_with_room_nothing_is_removed(run, disk):
    disk(5 * EACH + 4_000_000)
    told: list[str] = []
    disk_guard.make_room(run, 1000, {20}, told.append)
    assert run.checkpoint_steps() == [10, 20, 30, 40, 50] and told == []


def test_without_room_all_go_but_the_newest_the_best_and_the_pinned(run, disk):
    disk(5 * EACH + 2_500_000)
    write_pinned(run, {10})
    told: list[str] = []
    disk_guard.make_room(run, 1000, {20}, told.append)
    assert run.checkpoint_steps() == [10, 20, 50]
    assert len(told) == 1 and "steps 30, 40 removed" in told[0]


def test_where_that_is_not_enough_the_run_stops_with_its_newest_checkpoint_whole(run, disk):
    disk(5 * EACH)
    write_pinned(run, {10, 30, 40})
    with pytest.raises(WorkerFailure, match="the newest one is step_000050") as caught:
        disk_guard.make_room(run, 1000, {20}, lambda _: None)
    assert caught.value.kind == "infra" and "resume" in str(caught.value.advice)
    assert run.checkpoint_steps() == [10, 20, 30, 40, 50]


def test_where_the_pins_cannot_be_read_nothing_is_removed(run, disk):
    disk(5 * EACH)
    run.pins.write_text("[10")
    with pytest.raises(WorkerFailure):
        disk_guard.make_room(run, 1000, {20}, lambda _: None)
    assert run.checkpoint_steps() == [10, 20, 30, 40, 50]


def test_before_the_first_checkpoint_its_size_follows_from_the_adapter(home):
    run = home.run("b-sft-1")
    run.create()
    assert disk_guard.checkpoint_bytes(run, 1000) == 12_000
    assert disk_guard.free_bytes(run) > 0
