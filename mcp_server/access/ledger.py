"""The ledger: what each key and each project has spent of the device, and what is left.

It is read from the rows of the runs, whose owner and project were stored when they were submitted.
"""

from collections.abc import Sequence

from engine.core.reply import Reply
from engine.home.rows import OPEN, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.user_config import UserConfig
from mcp_server.access.keys import list_keys, projects_of
from mcp_server.access.quotas import counted_in_all


def spent_by_key(home: Home) -> dict[str, Reply]:
    """Return the entry of each key, by its name: what its runs took and how many are open."""
    config = home.user_config()
    with Store(home) as store:
        return {
            key.name: _entry(config, store.owned_runs(key.caller_id), key.max_gpu_hours)
            for key in list_keys(home)
        }


def spent_by_project(home: Home) -> list[Reply]:
    """Return an entry for each project that has a budget or a key."""
    config = home.user_config()
    budgets = projects_of(home)
    keys = list_keys(home)
    names = sorted({*budgets, *(key.project for key in keys)} - {""})
    with Store(home) as store:
        return [
            {
                "project": name,
                "keys": [key.name for key in keys if key.project == name],
                **_entry(config, store.owned_runs(project=name), budgets.get(name, 0.0)),
            }
            for name in names
        ]


def _entry(config: UserConfig, rows: Sequence[RunRow], max_gpu_hours: float) -> Reply:
    """Return what these runs took: `spent_gpu_hours`, `spent_money` if config.toml sets a price,
    `open_runs`, and of a limit (0: none) what is left: open runs count with their caps."""
    entry: Reply = {
        "spent_gpu_hours": round(sum(row.spent_hours for row in rows), 3),
        "open_runs": sum(row.state in OPEN for row in rows),
    }
    money = sum(row.spent_hours * config.price_of(row.compute) for row in rows)
    if money:
        entry["spent_money"] = round(money, 2)
    if max_gpu_hours:
        entry["max_gpu_hours"] = max_gpu_hours
        entry["left_gpu_hours"] = round(max(0.0, max_gpu_hours - counted_in_all(rows)), 3)
    return entry
