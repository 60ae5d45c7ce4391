"""Checkpoints that the user keeps: pinned, listed, unpinned, and named where a run is deleted."""

import pytest

from engine.core.errors import UserError
from engine.home.owner_marks import pinned_steps
from engine.runs import deletion, lifecycle, pins


def test_a_pinned_checkpoint_is_listed_until_it_is_unpinned(home, tuned):
    reply = pins.pin(home, tuned, 5)
    assert (reply["pinned"], reply["checkpoints"]) == ([5], [5, 10])
    assert pins.pin(home, tuned, 5)["pinned"] == [5]  # again: nothing changes
    assert pins.pin(home, tuned, 10)["pinned"] == [5, 10]
    assert lifecycle.status(home, tuned)["pinned"] == [5, 10]
    assert pins.unpin(home, tuned, 5)["pinned"] == [10]


def test_a_checkpoint_that_does_not_exist_cannot_be_pinned(home, tuned):
    with pytest.raises(UserError, match="has no checkpoint of step 7") as caught:
        pins.pin(home, tuned, 7)
    assert caught.value.code == "MODEL_NOT_FOUND" and "5, 10" in str(caught.value.advice)
    assert pinned_steps(home.run(tuned)) == set()


def test_what_is_not_pinned_cannot_be_unpinned(home, tuned):
    pins.pin(home, tuned, 5)
    with pytest.raises(UserError, match="is not pinned"):
        pins.unpin(home, tuned, 10)


def test_the_beginning_of_an_id_is_enough_and_said(home, tuned):
    reply = pins.pin(home, tuned[:-2], 5)
    assert reply["run_id"] == tuned and "was taken as" in reply["warnings"][0]


def test_a_run_with_pinned_checkpoints_is_deleted_only_by_force(home, tuned):
    pins.pin(home, tuned, 5)
    with pytest.raises(UserError, match="has pinned checkpoints: step 5") as caught:
        deletion.deletable(home, [tuned])
    assert caught.value.code == "RUN_STATE" and "--force" in str(caught.value.advice)
    ids, warnings = deletion.deletable(home, [tuned], force=True)
    assert ids == [tuned] and any("step 5" in warning for warning in warnings)
    deletion.delete_run(home, tuned)
    assert not home.run(tuned).pins.exists()


def test_damaged_pins_stand_against_deletion_and_do_not_hide_the_run(home, tuned):
    home.run(tuned).pins.write_text("[5")
    assert lifecycle.status(home, tuned)["state"] == "done"
    with pytest.raises(UserError, match=r"pins\.json cannot be read"):
        deletion.deletable(home, [tuned])
