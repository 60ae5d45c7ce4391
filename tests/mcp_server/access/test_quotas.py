"""What a plan takes of a key's quota: as many runs as it has, and the one cap that they share."""

import pytest

from engine.core.errors import UserError
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.access.audit_log import Audit, Call
from mcp_server.access.keys import Key
from mcp_server.access.quotas import cap_of_resumed_run, check_quota, limits_and_use

CHAIN = {"then": [{"algorithm": "grpo"}, {"algorithm": "evaluate"}]}


def add_plan(home: Home, at: float, cap: float) -> None:
    """A plan of two runs that the key "agent" submitted at that time."""

    def make(plan_id: str, ids: list[str]):
        row = NewRun("arith-sft", "train", "sft", "arith@0", "pebble", max_gpu_hours=cap)
        return NewRun(**vars(row) | {"plan": plan_id}), lambda run_id: None

    with Store(home) as store:
        rows = store.insert_plan("arith", "", {}, [make, make])
    with Audit(home, clock=lambda: at).recording(Call("agent", "http", "submit_train", {})) as line:
        line.succeeded({"run_id": rows[0].plan})


def refusal(home: Home, key: Key, **arguments: object) -> str:
    try:
        check_quota(home, key, "submit_train", arguments, clock=lambda: 100.0)
    except UserError as error:
        assert error.code == "QUOTA" and error.hint
        return error.message
    return ""


@pytest.mark.parametrize(
    ("arguments", "runs"), [({}, 1), (CHAIN, 3), (CHAIN | {"vary": {"seed": [1, 2]}}, 5)]
)
def test_a_plan_takes_the_place_of_all_its_runs(home: Home, arguments: dict, runs: int):
    assert not refusal(home, Key("agent", max_runs=runs), **arguments)
    if runs > 1:
        assert f"{runs} runs" in refusal(home, Key("agent", max_runs=runs - 1), **arguments)


def test_an_open_plan_counts_its_runs_and_its_one_cap(home: Home):
    add_plan(home, at=50, cap=1.5)
    key = Key("agent", max_runs=3, gpu_hours_per_day=4)
    limits = limits_and_use(home, key, clock=lambda: 100.0)
    assert limits["open_runs"] == ["arith-sft-1", "arith-sft-2"]
    assert (limits["used_gpu_hours"], limits["left_gpu_hours"]) == (1.5, 2.5)
    assert "3 runs" in refusal(home, key, **CHAIN)
    assert not refusal(home, key)
    assert cap_of_resumed_run(home, "arith-plan-1") == 1.5


def test_an_ended_plan_counts_what_its_runs_took(home: Home):
    add_plan(home, at=50, cap=1.5)
    with Store(home) as store:
        for row in store.plan_runs("arith-plan-1"):
            store.set_state(row.run_id, "cancelled", only_from={"queued"}, spent_hours=0.25)
    limits = limits_and_use(home, Key("agent", gpu_hours_per_day=4), clock=lambda: 100.0)
    assert limits["used_gpu_hours"] == 0.5 and not limits["open_runs"]


def test_a_resumed_plan_takes_the_place_of_all_its_runs_that_did_not_get_done(home: Home):
    add_plan(home, at=50, cap=1.5)
    with Store(home) as store:
        for row in store.plan_runs("arith-plan-1"):
            store.set_state(row.run_id, "cancelled", only_from={"queued"})
    assert not refusal(home, Key("agent", max_runs=2), resume="arith-plan-1")
    assert "2 runs" in refusal(home, Key("agent", max_runs=1), resume="arith-plan-1")
    assert not refusal(home, Key("agent", max_runs=1), resume="arith-sft-2")


def test_a_run_of_a_plan_that_is_resumed_by_itself_counts_once(home: Home):
    add_plan(home, at=50, cap=1.5)
    with Store(home) as store:
        for row in store.plan_runs("arith-plan-1"):
            store.set_state(row.run_id, "cancelled", only_from={"queued"}, spent_hours=0.25)
    call = Call("agent", "http", "submit_train", {})
    with Audit(home, clock=lambda: 60).recording(call) as line:
        line.succeeded({"run_id": "arith-sft-2", "resumed_from": ""})
    limits = limits_and_use(home, Key("agent", gpu_hours_per_day=4), clock=lambda: 100.0)
    assert limits["used_gpu_hours"] == 0.5
