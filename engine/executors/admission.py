"""Whether a run can go to another machine, and where it goes if that fails: asked of what is known
here, without a connection."""

from collections.abc import Collection

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.hardware import Hardware
from engine.environments.registry import EnvRecord
from engine.executors import hosts
from engine.executors.bundle import why_not_sent
from engine.home.config_tables.hosts import SKY
from engine.home.rows import LOCAL
from engine.home.run_dir import Home
from engine.records.settings import GivenSettings, TrainSettings


def compute_of(settings: GivenSettings) -> str:
    """Return where a run with these settings is to run: a host such as "ssh:box", or LOCAL for this
    machine. The settings are as a user gave them; anything that names no host means LOCAL."""
    compute = settings.get("compute")
    if isinstance(compute, str) and compute.startswith(hosts.KINDS):
        return compute
    return LOCAL


def machine_for(home: Home, settings: GivenSettings) -> Hardware:
    """Return the hardware that a run with these settings is planned for: that of this machine, or
    of a host as it was at its last check. Raises UserError HOST_NOT_FOUND or HOST_UNUSABLE."""
    compute = compute_of(settings)
    return hardware.detect(home.root) if compute == LOCAL else hosts.machine_of(home, compute)


def has_vllm(settings: GivenSettings, *, is_here: bool) -> bool:
    """Tell whether vLLM may sample for a run with these settings. `is_here` says whether vLLM is
    installed on this machine; the set-up of a host never installs it."""
    return is_here and compute_of(settings) == LOCAL


def check_placement(home: Home, settings: TrainSettings, record: EnvRecord) -> str:
    """Check that a run can be carried out on the host that its settings name; `record` is the
    environment that it trains on.

    Returns a text that says where it runs; "" for a run on this machine. Raises UserError
    HOST_NOT_FOUND, HOST_UNUSABLE (not set up), ENV_DEPS (the environment cannot be used there) or
    SETTING_INVALID.
    """
    if settings.compute == LOCAL:
        return ""
    host = hosts.host_of(home, settings.compute)
    facts = hosts.facts_of(home, host)
    why_not = why_not_sent(record)
    if why_not:
        raise UserError(
            "ENV_DEPS",
            f"{record.env_id} {why_not}",
            hint="Leave compute out: it is trained on here.",
            field="settings.compute",
        )
    if settings.quantization != "none" and "bitsandbytes" not in facts.packages:
        raise UserError(
            "SETTING_INVALID",
            f'quantization = "{settings.quantization}", but {host.name} has no bitsandbytes',
            hint=f"Leave quantization out, or run `honesmith hosts setup {host.name} --again`.",
            field="settings.quantization",
        )
    failover = f"; if that fails, {host.failover}" if host.failover else ""
    return f"it runs on {host.name} with {facts.python}{failover}"


def check_rented(home: Home, settings: TrainSettings, hours: float) -> None:
    """Check that a run may rent the machine that its settings name. The price is the one that the
    host's last check was offered, so no connection is made. Hosts that are not rented pass.

    Args:
        hours: how long the run likely takes.

    Raises UserError BUDGET if an hour costs more than the host's max_price, or if the run takes
    longer than its max_hours; HOST_NOT_FOUND or HOST_UNUSABLE as `machine_for`.
    """
    if settings.compute == LOCAL:
        return
    host = hosts.host_of(home, settings.compute)
    if host.kind != SKY:
        return
    price, sky = hosts.facts_of(home, host).price, host.sky
    where = f"[hosts.{host.name}] of {home.config_file}"
    if sky.max_price and price > sky.max_price:
        raise UserError(
            "BUDGET",
            f"an hour of {host.name} was {price:.2f} at its last check, and max_price is "
            f"{sky.max_price:g}",
            hint=f"Raise max_price in {where} or name cheaper accelerators there; then "
            f"`honesmith hosts check {host.name}`.",
            field="settings.compute",
        )
    if hours > sky.max_hours:
        raise UserError(
            "BUDGET",
            f"the run likely takes {hours:.1f} h, and a machine of {host.name} ends after "
            f"{sky.max_hours:g}",
            hint=f"Lower steps, or raise max_hours in {where}.",
            field="settings.compute",
        )


def place_after(home: Home, compute: str, passed: Collection[str]) -> str:
    """Return where a run goes if the place `compute` fails: the `failover` of that host in
    config.toml. Returns "" if it has none, or if that is one of the places `passed` already."""
    if compute == LOCAL:
        return ""
    failover = hosts.host_of(home, compute).failover
    return "" if failover in (*passed, compute) else failover


def refuse_trial(settings: GivenSettings, argument: str) -> None:
    """Raise UserError BAD_ARGUMENT if a user wants to try a model on this machine before a run that
    goes to another. `argument` is the name of the argument that asks for the trial; "" for none."""
    compute = compute_of(settings)
    if compute != LOCAL and argument:
        raise UserError(
            "BAD_ARGUMENT",
            f"{argument} tries the model on this machine, and compute = {compute!r} is another",
            hint=f"Leave {argument} out, or compute.",
            field=argument,
        )
