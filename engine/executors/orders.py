"""What the other side is told of a run, and how its answers are read, whoever carries them."""

from collections.abc import Mapping, Sequence

from engine.core.errors import FAILURE_KINDS
from engine.core.files import JsonObject
from engine.core.hints import Hint
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import one_line
from engine.home.store import Store
from engine.machine.processes import limits, outcome
from engine.machine.processes.launcher import spent_hours
from engine.machine.processes.seam import End, Life, Owned

LIVES: Mapping[str, Life] = {
    "pending": "pending",
    "running": "running",
    "exited": "exited",
    "gone": "gone",
}
_STATES = ("done", "failed", "cancelled")
_VERDICTS = ("better", "worse", "no_difference", "inconclusive", "unknown")


def cap_left(home: Home, row: RunRow) -> float:
    """The device hours that a run may still take over there, which ends it too if nobody here does:
    of its own cap, which the runs of a plan share, and of the home's. 0 for no cap."""
    with Store(home) as store:
        cap = limits.nearest_cap(store, home.run(row.run_id), row)
    if cap is None:
        return 0.0
    under_way = spent_hours(home, row) - row.spent_hours  # of this attempt, which the cap includes
    return max(1e-6, row.device_hours(cap.seconds) - under_way)


def columns(row: RunRow, cap: float) -> JsonObject:
    """What the run's row over there needs beside its id."""
    return {
        "name": row.run_id.rpartition("-")[0],
        **{key: getattr(row, key) for key in ("kind", "algorithm", "env_id", "model")},
        "note": row.note,
        "expect": row.expect,
        "max_gpu_hours": cap,
        "gpus": row.gpus,
    }


def config_toml(home: Home) -> str:
    """The config.toml of the home over there: what the owner of this one chose for user code."""
    config = home.user_config()
    values = {
        "sandbox": f'"{config.sandbox}"',
        "allow_root": "true" if config.allow_root else "false",
        "stop_stalled_minutes": f"{config.stop_stalled_minutes:g}",
    }
    return "".join(f"{name} = {value}\n" for name, value in values.items())


def owned(answer: JsonObject) -> Sequence[Owned]:
    """The jobs that an answer lists."""
    listed = answer.get("owned")
    return [
        Owned(one_line(str(each["run_id"]), 200), int(each["launch"]), LIVES[each["life"]])
        for each in (listed if isinstance(listed, list) else [])
    ]


def end_of(end: Mapping[str, object], run: RunDir) -> End:
    """How a run ended, as the other side says; a word that is none of ours becomes the worst."""
    state, kind = str(end.get("state")), str(end.get("reason_kind"))
    verdict = str(end.get("verdict"))
    return End(
        state=state if state in _STATES else "failed",
        reason_kind=kind if kind in FAILURE_KINDS else "internal",
        reason=one_line(str(end.get("reason", "")), 500),
        hint=_hint_of(end.get("hint"), run),
        verdict=verdict if verdict in _VERDICTS else "unknown",
        is_lost=end.get("is_lost") is True,
    )


def _hint_of(stored: object, run: RunDir) -> Hint:
    """The next move that the other side names, as one line; of calls only the run's own resume."""
    hint = Hint.from_json(stored)
    resume = outcome.resume_hint(run).call
    is_resume = hint.call is not None and hint.call.tool == "submit_train"
    return Hint(one_line(hint.text, 300), resume if is_resume else None)
