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
from mcp_server.access.quotas import total_counted_hours


def spent_by_key(home: Home) -> dict[str, Reply]:
    """Return key name -> what the runs of the key took, as JSON: GPU-hours, open runs, and if they
    are known the money and the hours left."""
    config = home.user_config()
    with Store(home) as store:
        return {
            key.name: _entry(config, store.owned_runs(key.caller_id), key.max_gpu_hours)
            for key in list_keys(home)
        }


def spent_by_project(home: Home) -> list[Reply]:
    """Return an entry for each project that has a budget or a key, sorted by name. As JSON it holds
    the project, the names of its keys, and what their runs took together: GPU-hours, open runs, and
    if they are known the money and the hours left."""
    config = home.user_config()
    budgets = projects_of(home)  # project -> GPU-hours
    keys = list_keys(home)
    names = sorted({*budgets, *(key.project for key in keys)} - {""})  # "": a key of no project
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
    """Return what the runs in `rows` took, as JSON:

    - `spent_gpu_hours`, and how many of the runs are open: `open_runs`.
    - `spent_money`, if config.toml sets a price for these hours.
    - `max_gpu_hours` (the limit) and `left_gpu_hours`, unless `max_gpu_hours` is 0: no limit. An
      open run takes as many hours of the limit as it may use at most.
    """
    entry: Reply = {
        "spent_gpu_hours": round(sum(row.spent_hours for row in rows), 3),
        "open_runs": sum(row.state in OPEN for row in rows),
    }
    money = config.money_of(rows)
    if money:
        entry["spent_money"] = round(money, 2)
    if max_gpu_hours:
        entry["max_gpu_hours"] = max_gpu_hours
        entry["left_gpu_hours"] = round(max(0.0, max_gpu_hours - total_counted_hours(rows)), 3)
    return entry
