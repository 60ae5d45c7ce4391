"""How many devices a run takes: those that the user gave, else those that are free and worth it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core.errors import UserError
from engine.core.hardware import Hardware
from engine.core.hints import Change, Hint
from engine.core.reply import Reply
from engine.home.rows import HOLDS_DEVICE
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.models.sizing import ranks
from engine.records.estimate import Estimate
from engine.records.settings import RowSettings, TrainSettings
from engine.settings import run_size
from engine.settings.defaults import HARDWARE, USER
from engine.settings.resolution import Resolved


@dataclass(frozen=True)
class OnGpus:
    """One choice of a number of devices for a run.

    Attributes:
        resolved: the settings with that number of devices.
        figures: the estimate of the run on these devices.
        free_now: whether so many devices are free now.
    """

    resolved: Resolved
    figures: Estimate
    free_now: bool

    @property
    def gpus(self) -> int:
        """The number of devices."""
        return self.resolved.settings.gpus

    def shown(self) -> Reply:
        """Return the fields of this choice that a reply shows."""
        return {
            "gpus": self.gpus,
            **run_size.roles(self.resolved.settings),
            "fits": self.figures.fits,
            "hours": self.figures.hours.likely,
            "gpu_hours": self.figures.gpu_hours.likely,
            "money": self.figures.money.likely,
            "free_now": self.free_now,
        }


def most_gpus(home: Home, hardware: Hardware) -> int:
    """Return how many devices of a machine one run may take.

    These are the machine's GPUs of the same model as the GPU for which runs are planned. A CPU
    counts as one device, or as `cpu_ranks` of config.toml if the owner sets that.
    """
    if hardware.device.kind == "cpu":
        return max(1, int(home.user_config().cpu_ranks))
    return sum(device.name == hardware.device.name for device in hardware.devices)


def check_gpus(home: Home, settings: TrainSettings, hardware: Hardware) -> None:
    """Raise UserError SETTING_INVALID if the setting `gpus` is above the number of devices of the
    machine (`hardware`) or of rows in a batch, or if `shard_base` does not fit the other
    settings."""
    device_count, batch_rows = most_gpus(home, hardware), rows_of_batch(settings)
    if settings.gpus > device_count:
        is_cpu = hardware.device.kind == "cpu"
        reason = "a CPU is one device" if is_cpu else f"there are {device_count}"
        message = f"gpus = {settings.gpus}, but {reason}"
        raise _too_many_gpus_error(message, min(device_count, batch_rows))
    if settings.gpus > batch_rows:
        message = f"gpus = {settings.gpus}, but a batch has {batch_rows} rows to share"
        raise _too_many_gpus_error(message, min(device_count, batch_rows))
    if settings.shard_base:
        _check_shards(settings)


def _check_shards(settings: TrainSettings) -> None:
    """Raise UserError SETTING_INVALID if the base model cannot be sharded (cut over several
    devices) with these settings."""
    if run_size.shards(settings) < 2:
        fault, hint = f"gpus = {settings.gpus} leaves one device to train", "Give more gpus."
    elif settings.quantization != "none":
        fault, hint = "weights of 4 bits are not sharded", "Leave one of the two out."
    elif run_size.sampling_gpus(settings) and not run_size.wants_server(settings):
        fault = "our own sampler beside training needs the whole base on each of its devices"
        hint = "Set sampler vllm, or leave async_sampling out."
    else:
        return
    message = f"shard_base: {fault}"
    raise UserError("SETTING_INVALID", message, hint=hint, field="settings.shard_base")


def _too_many_gpus_error(message: str, most: int) -> UserError:
    """Make the error for a setting `gpus` that is above `most`; `message` says why."""
    hint = Hint(f"Give at most {most}, or leave gpus out.", change=Change(settings={"gpus": most}))
    return UserError("SETTING_INVALID", message, hint=hint, field="settings.gpus")


def rows_of_batch(settings: TrainSettings) -> int:
    """Return the number of rows in the batch of one step: at most so many devices can share it."""
    if isinstance(settings, RowSettings):
        return settings.batch_size
    return settings.prompts_per_step * settings.group_size


def decide(
    home: Home, resolved: Resolved, hardware: Hardware, estimate: Callable[[Resolved], Estimate]
) -> tuple[Resolved, Sequence[OnGpus]]:
    """Choose how many devices of the machine (`hardware`) a run with the settings `resolved` takes.

    `estimate` returns the estimate of a run with given settings. Returns the settings with the
    chosen number, and the choices with their estimates ([] if the run may have only one device).
    Raises UserError SETTING_INVALID if a number that the user gave is too high, or if `shard_base`
    does not fit the other settings.
    """
    on_gpus = _gpu_options(home, resolved, hardware, estimate)
    chosen = _choose_gpu_count(resolved, on_gpus)
    check_gpus(home, chosen.settings, hardware)
    return chosen, on_gpus


def _gpu_options(
    home: Home, resolved: Resolved, hardware: Hardware, estimate: Callable[[Resolved], Estimate]
) -> Sequence[OnGpus]:
    """Estimate the run for every number of devices that it may have, in ascending order.

    `estimate` returns the estimate of a run with given settings. Returns [] if the run may have
    only one device.
    """
    most_devices = min(most_gpus(home, hardware), rows_of_batch(resolved.settings))
    if hardware.device.kind == "cpu" or most_devices < 2:
        return []
    with Store(home.whole) as store:  # the runs of all keys hold devices
        rows = store.list_runs(limit=1000, states=HOLDS_DEVICE)
    busy_ids: set[str] = set()
    for row in rows:
        if row.compute == resolved.settings.compute:  # it runs on the same machine
            busy_ids |= set(row.devices)
    same_model = [device for device in hardware.devices if device.name == hardware.device.name]
    free_count = sum(device.id not in busy_ids for device in same_model)
    options = []
    for gpus in range(1, most_devices + 1):
        fitting, figures = _settings_that_fit(with_gpus(resolved, gpus), estimate)
        options.append(OnGpus(fitting, figures, free_now=gpus <= free_count))
    return options


def _settings_that_fit(
    resolved: Resolved, estimate: Callable[[Resolved], Estimate]
) -> tuple[Resolved, Estimate]:
    """Return settings with which the run fits into the memory of its devices, and their estimate.

    If the run fits only with its base model sharded (cut over the devices), and the user did not
    set `shard_base`, that setting is switched on. Otherwise the settings are returned unchanged.
    """
    figures = estimate(resolved)
    if figures.fits or resolved.sources.get("shard_base") == USER:
        return resolved, figures
    sharded = _with_setting(resolved, "shard_base", True)
    try:
        _check_shards(sharded.settings)
    except UserError:
        return resolved, figures
    sharded_figures = estimate(sharded)
    if sharded_figures.fits:
        return sharded, sharded_figures
    return resolved, figures


def _choose_gpu_count(resolved: Resolved, on_gpus: Sequence[OnGpus]) -> Resolved:
    """Return the settings with the number of devices that the run takes. `on_gpus` holds a choice
    for each number, in ascending order; [] if only one device is possible.

    A number that the user gave is kept. Otherwise the run takes the free devices that make it
    enough faster, and at least as many as it needs to fit into memory.
    """
    if not on_gpus:
        return resolved
    options = {option.gpus: option for option in on_gpus}
    if resolved.sources.get("gpus") == USER:
        requested = options.get(resolved.settings.gpus)
        return requested.resolved if requested else resolved
    # `on_gpus` is ascending: the first option that fits has the fewest devices.
    fewest = next((option.gpus for option in on_gpus if option.figures.fits), 1)
    seconds_by_count: dict[int, float] = {}
    for option in on_gpus:
        is_candidate = option.gpus == fewest or (option.gpus > fewest and option.free_now)
        if is_candidate:
            seconds_by_count[option.gpus] = 3600 * option.figures.hours.likely
    gpus = ranks.paying_gpu_count(seconds_by_count)  # the number that makes the run enough faster
    return options[gpus].resolved


def with_gpus(resolved: Resolved, gpus: int) -> Resolved:
    """Return the settings with `gpus` devices."""
    return resolved if gpus == resolved.settings.gpus else _with_setting(resolved, "gpus", gpus)


def _with_setting(resolved: Resolved, name: str, value: object) -> Resolved:
    """Return a copy of the settings with the setting `name` changed to `value`, and "hardware" as
    its source."""
    return replace(
        resolved,
        settings=resolved.settings.model_copy(update={name: value}),
        sources=resolved.sources | {name: HARDWARE},
    )
