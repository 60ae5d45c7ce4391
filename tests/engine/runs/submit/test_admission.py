"""What may not be queued, check by check."""

import pytest
from run_configs import ESTIMATE

from engine.core.errors import UserError
from engine.cost.estimate import DISK_RESERVE, Forecast
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.estimate import Estimate
from engine.runs.submit.admission import LOOK_HOURS, cap_of, check_size, check_texts


def test_a_full_disk_is_told_with_what_has_to_stay_free():
    figures = Estimate.model_validate(ESTIMATE | {"disk_fits": False, "disk_bytes": 8_400_000})
    with pytest.raises(UserError) as caught:
        check_size(Forecast(figures, {}), DISK_RESERVE - 1)
    assert caught.value.code == "DISK_FULL" and caught.value.retryable
    assert "8.4 MB" in caught.value.message and "500.0 MB stay free" in caught.value.message


@pytest.mark.parametrize(
    ("name", "text"),
    [("note", "x" * 4_001), ("reason", "a\0b"), ("request_id", "x" * 201)],
)
def test_words_that_nobody_could_show_are_refused(name: str, text: str):
    with pytest.raises(UserError) as caught:
        check_texts(**{name: text})
    assert caught.value.code == "BAD_ARGUMENT" and caught.value.field == name
    assert caught.value.hint and len(caught.value.message) < 100


def test_words_of_an_ordinary_length_pass():
    check_texts(note="x" * 4_000, request_id="try-1", reason="")


@pytest.mark.parametrize(("limit", "most"), [(0, LOOK_HOURS), (3.5, 3.5)])
def test_an_evaluation_is_held_to_what_the_home_starts_without_a_person(
    home: Home, limit: float, most: float
):
    assert cap_of(home, None, lambda: 5.0) == 0, "nobody counts"
    home.config_file.write_text(f"auto_approve_gpu_hours = {limit}")
    assert cap_of(home, None, lambda: 0.9 * most) == most
    assert cap_of(home, lambda hours: 2 * hours, lambda: 0.1 * most) == 0.2 * most
    with pytest.raises(UserError) as caught:
        cap_of(home, None, lambda: 1.1 * most)
    assert caught.value.code == "NOT_APPROVED" and f"{most:g}" in caught.value.message


def test_an_evaluation_is_refused_where_the_hours_of_the_home_are_spent(home: Home):
    home.config_file.write_text("max_gpu_hours_total = 1")
    assert cap_of(home, None, lambda: 5.0) == 0
    with Store(home) as store:
        row = store.insert_run(NewRun("arith-sft", "train", "sft", "arith@0", "pebble"))
        store.set_state(row.run_id, "cancelled", only_from={"queued"}, spent_hours=1.0)
    with pytest.raises(UserError) as caught:
        cap_of(home, None, lambda: 0.001)
    assert caught.value.code == "BUDGET"
