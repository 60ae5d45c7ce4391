"""How many devices a run takes: as many as it was given, else as many as are free and pay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core.errors import UserError
from engine.core.hardware import Hardware
from engine.core.hints import Change, Hint
from engine.core.reply import Reply
from engine.home.rows import HOLDS_DEVICE
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.records.estimate import Estimate
from engine.records.settings import RowSettings, TrainSettings
from engine.settings.defaults import HARDWARE, USER
from engine.settings.resolution import Resolved
from engine.sizing import ranks


@dataclass(frozen=True)
class OnGpus:
    """What a run would take on so many devices, and whether they are free now."""

    gpus: int
    figures: Estimate
    free_now: bool

    def shown(self) -> Reply:
        """As a reply shows it."""
        return {
            "gpus": self.gpus,
            "hours": self.figures.hours.likely,
            "gpu_hours": self.figures.gpu_hours.likely,
            "money": self.figures.money.likely,
            "free_now": self.free_now,
        }


def most_gpus(home: Home, hardware: Hardware) -> int:
    """How many devices one run may take: the GPUs of the machine that are of the model that runs
    are planned for. On a CPU one, or as many processes as its owner allows (`cpu_ranks`)."""
    if hardware.device.kind == "cpu":
        return max(1, int(home.user_config().cpu_ranks))
    return sum(device.name == hardware.device.name for device in hardware.devices)


def check_gpus(home: Home, settings: TrainSettings, hardware: Hardware) -> None:
    """Raise UserError SETTING_INVALID where the run is to have more devices than there are, or more
    than rows in a batch."""
    most, rows = most_gpus(home, hardware), rows_of_batch(settings)
    if settings.gpus > most:
        there_are = "a CPU is one device" if hardware.device.kind == "cpu" else f"there are {most}"
        message = f"gpus = {settings.gpus}, but {there_are}"
        raise _too_many(message, min(most, rows))
    if settings.gpus > 1 and _samples_beside(settings):
        raise UserError(
            "SETTING_INVALID",
            f"gpus = {settings.gpus} with async_sampling, which one process does beside training",
            hint=Hint("Leave one of them out.", change=Change(without=("async_sampling",))),
            field="settings.gpus",
        )
    if settings.gpus > rows:
        message = f"gpus = {settings.gpus}, but a batch has {rows} rows to share"
        raise _too_many(message, min(most, rows))


def _too_many(message: str, most: int) -> UserError:
    """The error for more devices than `most`."""
    hint = Hint(f"Give at most {most}, or leave gpus out.", change=Change(settings={"gpus": most}))
    return UserError("SETTING_INVALID", message, hint=hint, field="settings.gpus")


def rows_of_batch(settings: TrainSettings) -> int:
    """Into how many parts the batch of a step can be cut at most."""
    if isinstance(settings, RowSettings):
        return settings.batch_size
    return settings.prompts_per_step * settings.group_size


def decide(
    home: Home, resolved: Resolved, hardware: Hardware, estimate: Callable[[Resolved], Estimate]
) -> tuple[Resolved, Sequence[OnGpus]]:
    """The settings with the number of devices that the run takes, and what it would take on every
    other number ([] where it may have only one). `estimate` gives the figures for settings. Raises
    UserError SETTING_INVALID as `check_gpus`."""
    check_gpus(home, resolved.settings, hardware)
    on_gpus = _options(home, resolved, hardware, estimate)
    return _chosen(resolved, on_gpus), on_gpus


def _options(
    home: Home, resolved: Resolved, hardware: Hardware, estimate: Callable[[Resolved], Estimate]
) -> Sequence[OnGpus]:
    """What the run would take on every number of devices that it may have; [] where it may have
    only one."""
    most = min(most_gpus(home, hardware), rows_of_batch(resolved.settings))
    if hardware.device.kind == "cpu" or most < 2 or _samples_beside(resolved.settings):
        return []
    with Store(home) as store:
        rows = store.list_runs(limit=1000, states=HOLDS_DEVICE)
    busy = {device for row in rows for device in row.devices}
    free = sum(d.name == hardware.device.name and d.id not in busy for d in hardware.devices)
    return [
        OnGpus(gpus, estimate(with_gpus(resolved, gpus)), free_now=gpus <= free)
        for gpus in range(1, most + 1)
    ]


def _chosen(resolved: Resolved, on_gpus: Sequence[OnGpus]) -> Resolved:
    """The settings with as many devices as are free and pay, where nobody gave their number."""
    if resolved.sources.get("gpus") == USER or not on_gpus:
        return resolved
    seconds = {
        option.gpus: 3600 * option.figures.hours.likely
        for option in on_gpus
        if option.free_now or option.gpus == 1
    }
    return with_gpus(resolved, ranks.paying(seconds))


def with_gpus(resolved: Resolved, gpus: int) -> Resolved:
    """The settings with this number of devices."""
    if gpus == resolved.settings.gpus:
        return resolved
    return replace(
        resolved,
        settings=resolved.settings.model_copy(update={"gpus": gpus}),
        sources=resolved.sources | {"gpus": HARDWARE},
    )


def _samples_beside(settings: TrainSettings) -> bool:
    """Whether the next batch is sampled while one is trained on, which one process does."""
    return bool(getattr(settings, "async_sampling", False))
