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
_LONGEST_IDLE_MINUTES = 24 * 60  # after which a model on a host is served no more
_STATES = ("done", "failed", "cancelled")
_VERDICTS = ("better", "worse", "no_difference", "inconclusive", "unknown")


def cap_left(home: Home, row: RunRow) -> float:
    """Return the device hours that a run may still take on a host; 0 if there is no cap.

    Of the run's own cap, which the runs of a plan share, and the home's, the one counts that is
    reached first. The host gets the number, so that it ends the run even if this machine cannot.
    """
    with Store(home) as store:
        cap = limits.nearest_cap(store, home.run(row.run_id), row)
    if cap is None:
        return 0.0
    # The cap is of the whole attempt that is under way, so what that has spent is taken off.
    spent_in_attempt = spent_hours(home, row) - row.spent_hours
    hours_left = row.device_hours(cap.seconds) - spent_in_attempt
    return max(1e-6, hours_left)  # never 0, which would mean that there is no cap


def columns(row: RunRow, cap: float) -> JsonObject:
    """Return the columns, beside the id, that the run's row in the host's database gets. `cap` is
    how many device hours it may take there; 0 for no cap."""
    return {
        "name": row.run_id.rpartition("-")[0],  # a run's id is NAME-NUMBER
        **{key: getattr(row, key) for key in ("kind", "algorithm", "env_id", "model")},
        "note": row.note,
        "expect": row.expect,
        "max_gpu_hours": cap,
        "gpus": row.gpus,
    }


def config_toml(home: Home) -> str:
    """Return the content of config.toml for the home on a host: those settings of this home that
    also hold there, such as how user code is isolated."""
    config = home.user_config()
    values = {
        "sandbox": f'"{config.sandbox}"',
        "allow_root": "true" if config.allow_root else "false",
        "stop_stalled_minutes": f"{config.stop_stalled_minutes:g}",
        # Never "never": nobody here may be left who would stop it.
        "idle_stop_minutes": f"{config.idle_stop_minutes or _LONGEST_IDLE_MINUTES:g}",
        "served_length": f"{config.served_length:g}",
    }
    return "".join(f"{name} = {value}\n" for name, value in values.items())


def owned(answer: JsonObject) -> Sequence[Owned]:
    """Return the jobs of this home that a host lists in its answer to `list_owned`."""
    listed = answer.get("owned")
    jobs = listed if isinstance(listed, list) else []
    return [
        Owned(one_line(str(job["run_id"]), 200), int(job["launch"]), LIVES[job["life"]])
        for job in jobs
    ]


def end_of(end: Mapping[str, object], run: RunDir) -> End:
    """Return how a run ended, from what the host says. A value that is not known here becomes the
    worst one: a state becomes "failed", a kind of reason "internal", a verdict "unknown"."""
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
    """Return the hint that the host gives after the run's end, as one line. Of the calls of tools
    that it may contain, only that to resume this run is kept, and made anew here: the host is not
    trusted to name calls."""
    hint = Hint.from_json(stored)
    is_resume = hint.call is not None and hint.call.tool == "submit_train"
    resume_call = outcome.resume_hint(run).call
    return Hint(one_line(hint.text, 300), resume_call if is_resume else None)
