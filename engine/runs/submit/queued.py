"""The reply about a queued run: where it stands, its estimate, what differs from its parent."""

from collections.abc import Mapping, Sequence

from engine.core.format import words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost import estimate
from engine.cost.hours import is_wide
from engine.evidence.stats.basics.target import target_in
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.pace.progress import write_status
from engine.machine.processes import launcher
from engine.records.run_config import RunConfig, TrainConfig

# The fields of an estimate that the reply shows.
_SHOWN_FIGURES = ("steps", "gpu_hours", "money", "device", "fits", "basis")


def start_and_reply(home: Home, row: RunRow, warnings: list[str]) -> Reply:
    """Start every queued run for which a device is free; return the reply about the run of `row`.

    The run's STATUS.md is written first. `warnings` become a part of the reply.
    """
    with Store(home) as store:
        write_status(home.run(row.run_id), row)
        launcher.reap(home)  # also starts queued runs
        return reply_of(home, store.get_run(row.run_id), warnings)


def reply_of(home: Home, row: RunRow, warnings: list[str]) -> Reply:
    """Make the reply about a run that was queued, now or by an earlier call.

    The reply has the run's state, its place in the queue (0 if it does not wait), its estimate,
    what differs from its parent, and `warnings`. For a queued run a warning is added that names
    secrets which the server lacks.
    """
    run = home.run(row.run_id)
    config = run.read_config()
    with Store(home) as store:
        position = store.queue_position(row.run_id)
    state_text = row.state
    if row.state == "queued":
        state_text = f"queued at position {position}"
        if row.waits_for:
            state_text = f"queued behind {', '.join(row.awaited_ids)}, whose model it waits for"
        warnings = warnings + _missing_secrets(run)
    return {
        "run_id": row.run_id,
        "state": row.state,
        "queue_position": position,
        "estimate": _shown_estimate(config),
        "settings_changed_from_parent": _changed_from_parent(home, config),
        "metrics_uri": f"run://{row.run_id}/metrics",
        "summary": f"{row.run_id} is {state_text}{_time_in_words(config)}.",
        "next": [_wait_call(row, config).to_json()],
        "warnings": warnings,
    }


def _missing_secrets(run: RunDir) -> list[str]:
    """Return a warning that names the secrets which a queued run needs and this server lacks.

    Returns [] if the server has all of them.
    """
    missing = launcher.missing_secrets(run)
    if not missing:
        return []
    return [f"it waits for a server that has the secrets {', '.join(missing)}"]


def _shown_estimate(config: RunConfig) -> Reply:
    """Return the part of the estimate in `config` that the reply about a queued training run shows.

    Returns {} for any other run. The tools dry_run and estimate_cost show the whole estimate.
    """
    if not isinstance(config, TrainConfig):
        return {}
    figures = estimate.shown(config.estimate)
    if not figures["money"]["high"]:  # no price is set
        del figures["money"]
    return {name: figures[name] for name in _SHOWN_FIGURES if name in figures}


def _time_in_words(config: RunConfig) -> str:
    """Say how long a training run is likely to take, by the estimate in `config`, as the end of a
    sentence.

    For example ": about 3 min (2 min to 6 min)". Returns "" for any other run.
    """
    if not isinstance(config, TrainConfig):
        return ""
    hours = config.estimate.hours
    between = f"{words(hours.low)} to {words(hours.high)}"
    basis_note = unmeasured_note([config.estimate.basis])
    wide_note = "; its first step measures more" if is_wide(hours) else ""
    return f": about {words(hours.likely)} ({between}){basis_note}{wide_note}"


def _wait_call(row: RunRow, config: RunConfig) -> Call:
    """Make the call that waits for the run.

    It waits only for the first step if the estimate is wide: that step is measured, which narrows
    it. It waits for news if the run has a target, which it may pass long before its end.
    """
    if isinstance(config, TrainConfig) and is_wide(config.estimate.hours):
        return Call("wait_run", {"run_id": row.run_id, "until": "first_step"})
    until = {} if target_in(row.expect) is None else {"until": "news"}
    return Call("wait_run", {"run_id": row.run_id, **until})


def unmeasured_note(bases: Sequence[str]) -> str:
    """Say that a time was estimated without measurements, as the end of a sentence.

    `bases` are the fields `basis` of the estimates behind the time: what each rests on. Returns ""
    if all of them rest on measurements.
    """
    if "model" not in bases:  # "model": computed from a table of devices
        return ""
    return ", from a table: this machine is not measured yet"


def _changed_from_parent(home: Home, config: RunConfig) -> Reply:
    """Compare a run's choices with its parent's: name -> [the parent's value, this run's value].

    Choices are the settings, the model, the environment and the algorithm. Returns {} if the run
    has no parent, or if the parent's config cannot be read.
    """
    if not isinstance(config, TrainConfig) or not config.parent:
        return {}
    parent = home.run(config.parent).find_config()
    if not isinstance(parent, TrainConfig):  # an evaluation, or None: gone or damaged
        return {}
    run_choices, parent_choices = _choices(config), _choices(parent)
    all_names = {**parent_choices, **run_choices}  # a dictionary, to keep their order
    return {
        name: [parent_choices.get(name), run_choices.get(name)]
        for name in all_names
        if parent_choices.get(name) != run_choices.get(name)
    }


def _choices(config: TrainConfig) -> Mapping[str, object]:
    """Return all settings of a run by name, together with its algorithm, model and environment."""
    other_choices = {"algorithm": config.algorithm, "model": config.model, "env_id": config.env_id}
    return config.settings.model_dump() | other_choices
