"""What keys and projects spent, and what no key can spend of another's."""

from pathlib import Path
from typing import Any

import pytest
from team import key_of, of

from engine.core.errors import UserError
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.access.keys import Key, set_project
from mcp_server.access.ledger import spent_by_key, spent_by_project
from mcp_server.access.quotas import cap_function_of, check_quota, limits_and_use


def run_of(home: Home, key: Key, *, cap: float = 0.0, spent: float | None = None) -> None:
    """A run of the key: an open one with a cap, or one that has ended and took hours."""
    with Store(of(home, key)) as store:
        new = NewRun("a-sft", "train", "sft", "a@0", "pebble", max_gpu_hours=cap)
        run_id = store.insert_run(new).run_id
        if spent is not None:
            store.set_state(run_id, "cancelled", only_from={"queued"}, spent_hours=spent)


def submit(home: Home, key: Key, **arguments: Any) -> Any:
    return check_quota(of(home, key, "use"), key, "submit_train", arguments)


def test_the_total_of_a_key_is_its_own(home: Home):
    ana = key_of(home, "ana", max_gpu_hours=10)
    bob = key_of(home, "bob", max_gpu_hours=10)
    run_of(home, bob, spent=9.0)
    run_of(home, ana, spent=3.0)
    run_of(home, ana, cap=4.0)
    assert submit(home, ana, max_gpu_hours=3.0) is None
    with pytest.raises(UserError) as refusal:
        submit(home, ana, max_gpu_hours=3.5)
    assert refusal.value.code == "QUOTA" and not refusal.value.retryable
    assert "10 GPU-hours in all and has used or promised 7" in refusal.value.message
    cap = submit(home, bob)
    assert cap.hours == 1.0 and "left of the hours in all" in cap.warning
    limits = limits_and_use(of(home, bob, "read"), bob)
    assert limits["budgets"] == [{"of": "in all", "hours": 10, "used": 9.0, "left": 1.0}]


def test_the_budget_of_a_project_is_for_all_its_keys_together(home: Home):
    set_project(home, "robots", 5.0)
    ana = key_of(home, "ana", project="robots")
    bob = key_of(home, "bob", project="robots")
    cem = key_of(home, "cem", project="ships")
    run_of(home, ana, spent=3.0)
    run_of(home, cem, spent=100.0)
    with pytest.raises(UserError, match="with the project robots"):
        submit(home, bob, max_gpu_hours=2.5)
    assert submit(home, bob, max_gpu_hours=2.0) is None
    assert submit(home, cem, max_gpu_hours=50.0) is None, "its project has no budget"
    caps = cap_function_of(of(home, bob), bob)
    assert caps is not None and caps(0.5) == 1.0
    with pytest.raises(UserError, match="project robots"):
        caps(2.5)
    assert ana.quota_group == bob.quota_group != cem.quota_group


def test_the_tightest_limit_decides(home: Home):
    ana = key_of(home, "ana", max_gpu_hours=1.0, gpu_hours_per_day=5.0)
    run_of(home, ana, spent=0.5)
    cap = submit(home, ana)
    assert cap.hours == 0.5


def test_the_ledger_names_what_each_spent_and_has_left(home: Home):
    home.config_file.write_text("gpu_hour_price = 2.0\n")
    set_project(home, "robots", 20.0)
    ana = key_of(home, "ana", project="robots", max_gpu_hours=10)
    bob = key_of(home, "bob", project="robots")
    run_of(home, ana, spent=3.0)
    run_of(home, ana, cap=2.0)
    run_of(home, bob, spent=1.0)
    spent = spent_by_key(home)
    assert spent["ana"] == {
        "spent_gpu_hours": 3.0,
        "open_runs": 1,
        "spent_money": 6.0,
        "max_gpu_hours": 10,
        "left_gpu_hours": 5.0,
    }
    assert spent["bob"] == {"spent_gpu_hours": 1.0, "open_runs": 0, "spent_money": 2.0}
    (project,) = spent_by_project(home)
    assert project["keys"] == ["ana", "bob"] and project["left_gpu_hours"] == 14.0


def test_a_run_keeps_the_project_it_was_submitted_for(home: Home, tmp_path: Path):
    ana = key_of(home, "ana", project="robots", priority="low")
    run_of(home, ana, cap=1.0)
    with Store(home) as store:
        (row,) = store.owned_runs(project="robots")
    assert (row.owner, row.priority) == ("ana", "low")
