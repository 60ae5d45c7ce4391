"""The model that a run starts from, while another run is still at work on it."""

import pytest

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.settings.start_models import model_to_train
from tests.helpers.run_configs import train_config


def test_the_model_of_a_run_that_is_being_stopped_is_refused_with_the_call_that_waits_for_it(
    home: Home,
):
    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        write_json(home.run(run_id).config, train_config(run_id, model="pebble"))

    with Store(home) as store:
        row = store.insert_run(NewRun("sums-sft", "train", "sft", "sums@0123", "pebble"), prepare)
        store.set_state(row.run_id, "preparing", only_from={"queued"})
        store.set_state(row.run_id, "running", only_from={"preparing"})
        assert model_to_train(home, row.run_id).waits_for == row.run_id
        store.set_state(row.run_id, "stopping", only_from={"running"})
    with pytest.raises(UserError, match="is stopping") as refusal:
        model_to_train(home, f"{row.run_id}@best")
    assert refusal.value.code == "RUN_STATE"
    assert "wait_run" in refusal.value.hint and row.run_id in refusal.value.hint
