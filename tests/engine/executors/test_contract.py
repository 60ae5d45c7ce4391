"""What every place to run holds to, whatever stands behind it (engine/machine/processes/seam.py).

A new executor: a subclass of `Place` in tests/helpers/places.py, and a row in PLACES.
"""

import contextlib
import threading

import pytest
from places import FakePlace, LocalPlace, Place, RayPlace, SkyPlace, SlurmPlace, SshPlace

from engine.machine.processes.seam import Owned

pytestmark = [pytest.mark.timeout(240)]
# The name of an executor -> the class that handles it, and the markers of its tests.
PLACES = {
    "local": (LocalPlace, ()),
    "fake": (FakePlace, ()),
    "ssh": (SshPlace, (pytest.mark.machines,)),
    "slurm": (SlurmPlace, (pytest.mark.machines,)),
    "ray": (RayPlace, (pytest.mark.machines,)),
    "sky": (SkyPlace, (pytest.mark.machines,)),
}
CRASHES = [
    pytest.param(name, point, marks=marks, id=f"{name}-{point}")
    for name, (kind, marks) in PLACES.items()
    for point in kind.points
]


@pytest.fixture(
    params=[pytest.param(name, marks=marks) for name, (_, marks) in PLACES.items()], name="place"
)
def each_place(request: pytest.FixtureRequest) -> Place:
    """Every place in turn."""
    return PLACES[request.param][0](request)


def owned(executor, run) -> list[Owned]:
    return [each for each in executor.list_owned() if each.run_id == run.id]


def test_what_is_started_runs_is_owned_ends_and_is_reaped_once_and_again(place):
    run = place.queue()
    with place.executor() as executor:
        assert executor.capabilities().hardware.devices
        handle = place.intend(run)
        assert executor.probe(run, handle).life in ("gone", "pending")
        place.put(executor, run, handle)
        assert place.until(executor, run, handle, "running").end is None
        place.until_held(run)
        executor.reap(run, handle)  # what lives stays
        assert executor.probe(run, handle).life == "running"
        assert [(each.launch, each.life) for each in owned(executor, run)] == [
            (handle.launch, "running")
        ]
        place.go(run)
        end = place.until(executor, run, handle, "exited").end
        assert end is not None and (end.state, end.verdict) == ("done", "better")
        assert place.trainings(run) == 1
        for _ in range(2):
            executor.reap(run, handle)
            assert owned(executor, run) == []


def test_a_start_that_is_said_twice_by_two_launchers_starts_once(place):
    run = place.queue()
    handle = place.intend(run)
    with place.executor() as one, place.executor() as other:
        place.put(one, run, handle)
        place.put(other, run, handle)
        place.until_held(run)
        one.start(run, handle)
        assert place.trainings(run) == 1
        place.go(run)
        assert place.until(other, run, handle, "exited").state == "done"
        other.start(run, handle)  # nor does one that has ended
        assert one.probe(run, handle).life == "exited" and place.trainings(run) == 1


def test_of_launchers_that_start_at_the_same_moment_one_wins(place):
    run = place.queue()
    handle = place.intend(run)
    together, faults = threading.Barrier(3), []

    def start() -> None:
        try:
            with place.executor() as executor:
                together.wait(30)
                place.put(executor, run, handle)
        except Exception as fault:  # noqa: BLE001 - said by the assertion below
            faults.append(fault)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    place.until_held(run)
    with place.executor() as executor:
        assert executor.probe(run, handle).life == "running"
        place.go(run)
        assert place.until(executor, run, handle, "exited").state == "done"
        assert place.trainings(run) == 1


@pytest.mark.parametrize(("place", "point"), CRASHES, indirect=["place"])
def test_whoever_dies_between_intent_and_handle_is_followed_by_one_who_finds_what_was_started(
    place, point
):
    run = place.queue()
    place.crash(point, run)
    with place.executor() as executor:
        handle = place.goes_on(executor, run)
        place.until_held(run)
        assert executor.probe(run, handle).life == "running"
        assert place.trainings(run) == 1
        assert len(owned(executor, run)) == 1
        place.go(run)
        assert place.until(executor, run, handle, "exited").state == "done"
        assert place.trainings(run) == 1


def test_what_cannot_be_asked_is_unknown_and_nothing_has_failed(place):
    run = place.queue()
    handle = place.intend(run)
    with place.executor() as executor:
        place.put(executor, run, handle)
        place.until_held(run)
        with place.unreachable(executor):
            probe = executor.probe(run, handle)
            assert (probe.life, probe.end) == ("unknown", None)
            with pytest.raises(Exception):  # noqa: B017 - of the executor's own kind
                executor.list_owned()
    with place.executor() as executor:
        assert executor.probe(run, handle).life == "running"
        place.go(run)
        assert place.until(executor, run, handle, "exited").state == "done"
        assert place.trainings(run) == 1


def test_a_stop_is_said_again_and_changes_nothing_more(place):
    run = place.queue()
    handle = place.intend(run)
    with place.executor() as executor:
        place.put(executor, run, handle)
        place.until_held(run)
        for _ in range(2):
            executor.stop(run, handle)
        end = place.until(executor, run, handle, "exited").end
        assert end is not None and (end.state, end.reason_kind) == ("cancelled", "cancelled")
        executor.stop(run, handle)
        assert executor.probe(run, handle).end == end
        executor.start(run, handle)  # nor is it started again
        assert executor.probe(run, handle).life == "exited" and place.trainings(run) == 1


def test_a_death_without_a_word_is_no_end(place):
    run = place.queue()
    handle = place.intend(run)
    with place.executor() as executor:
        place.put(executor, run, handle)
        place.until_held(run)
        place.die(run)
        # There it may go on by itself, as any home does.
        probe = executor.probe(run, handle)
        assert probe.life in ("gone", "pending", "running") and probe.end is None
        executor.stop(run, handle)
        executor.reap(run, handle)
        place.until(executor, run, handle, "gone", "exited")


def test_without_a_word_for_the_lease_it_ends_by_itself(place):
    run = place.queue()
    handle = place.intend(run)
    with place.executor() as executor:
        place.put(executor, run, handle)
        place.until_held(run)
        place.lose_lease(run)
        end = place.until(executor, run, handle, "exited").end
        assert end is not None and (end.state, end.reason_kind) == ("failed", "lease")


def test_an_older_launch_neither_ends_nor_replaces_the_newer_one_nor_lends_it_its_end(place):
    """Two launchers with one run, as after a home was copied: only the newer counts."""
    run = place.queue()
    old = place.intend(run)
    with place.executor() as executor, place.executor() as of_old:
        place.put(executor, run, old)
        place.until_held(run)
        executor.stop(run, old)
        assert place.until(executor, run, old, "exited").state == "cancelled"
        new = place.again(run, old)
        assert (new.launch, executor.probe(run, new).life) == (old.launch + 1, "gone")
        place.put(executor, run, new)
        place.until_held(run)
        assert of_old.probe(run, old).life == "gone"
        with contextlib.suppress(Exception):  # it may be refused in words
            place.put(of_old, run, old)
        of_old.start(run, old)
        of_old.stop(run, old)
        of_old.reap(run, old)
        probe = executor.probe(run, new)
        assert (probe.life, probe.end) == ("running", None)
        assert [each.launch for each in owned(executor, run)] == [new.launch]
        place.go(run)
        assert place.until(executor, run, new, "exited").state == "done"


def test_the_word_of_an_older_launch_renews_no_lease(place):
    run = place.queue()
    old = place.intend(run)
    with place.executor() as executor:
        place.put(executor, run, old)
        place.until_held(run)
        executor.stop(run, old)
        place.until(executor, run, old, "exited")
        new = place.again(run, old)
        place.put(executor, run, new)
        place.until_held(run)
        before = place.word(run)
        executor.probe(run, old)
        executor.start(run, old)
        assert place.word(run) == before
        executor.stop(run, new)
        place.until(executor, run, new, "exited")
