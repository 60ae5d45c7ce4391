"""Where a run goes on whose place has failed: the `failover` of its host in config.toml, or the
next one in that row that can take it."""

from engine.core.errors import UserError
from engine.environments import registry
from engine.executors.admission import check_placement, check_rented, machine_for, place_after
from engine.home.rows import LOCAL, RunRow
from engine.home.run_dir import Home
from engine.machine.processes import launcher
from engine.records.run_config import TrainConfig
from engine.records.settings import TrainSettings

# Of the kinds of failure in engine/core/errors.py, those for which the place is to blame.
FAULTS_OF_PLACE = ("infra", "interrupted")


def next_place(home: Home, config: TrainConfig, row: RunRow) -> tuple[str, list[str]]:
    """Return where a run goes on that cannot go on where it is, as `compute` names places; "" if no
    place is left. No place is tried twice.

    The second value says of each place that was passed over why it cannot take the run.
    """
    passed, reasons = list(row.hours_by_place()), []
    place = row.compute
    while place := _place_after(home, place, passed):
        why_not = _why_not_at(home, config, place)
        if not why_not:
            return place, reasons
        reasons.append(f"{place} cannot take it: {why_not}")
        passed.append(place)
    return "", reasons


def _place_after(home: Home, place: str, passed: list[str]) -> str:
    """As `place_after`, but "" if config.toml no longer names the host, or is damaged."""
    try:
        return place_after(home, place, passed)
    except UserError:
        return ""


def _why_not_at(home: Home, config: TrainConfig, place: str) -> str:
    """Say why a run cannot go on at `place`; "" if it can, by what was last learnt of it."""
    assert isinstance(config.settings, TrainSettings)
    settings = config.settings.model_copy(update={"compute": place})
    try:
        if place == LOCAL:  # these raise NO_TORCH, and SETTING_INVALID
            launcher.worker_python(home)
            launcher.require_quantizer(home, settings.quantization)
        machine = machine_for(home, {"compute": place})
        check_placement(home, settings, registry.find_env(home, config.env_id, sealed=True))
        check_rented(home, settings, config.estimate.hours.likely)
    except UserError as error:
        return error.message
    kind, _, _ = config.device.partition(":")  # "cuda:0" is of the kind cuda
    fitting = [
        device
        for device in machine.devices
        if device.kind == kind and device.memory_total >= config.least_memory
    ]
    count = settings.gpus if kind != "cpu" else 1
    if len(fitting) < count:
        memory = f"{config.least_memory / 1e9:.1f} GB"
        return f"it has {len(fitting)} of {count} {kind} devices with {memory} of memory"
    return ""
