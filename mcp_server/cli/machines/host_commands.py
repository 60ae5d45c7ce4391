"""Commands about other machines: `honesmith hosts ...`."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated

import typer

from engine.core.errors import UserError
from engine.home.config_tables.hosts import RAY, SKY, SLURM
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.api import host_verbs
from mcp_server.screen.terminal import (
    CommandGroup,
    HomeFolder,
    Json,
    command,
    home_of,
    show,
    working,
)

app = typer.Typer(
    help="Other machines: over SSH, or a cluster.", no_args_is_help=True, cls=CommandGroup
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `compute` names it after the colon.")]


@dataclass(frozen=True)
class HostOptions:
    """What `honesmith hosts add` writes into config.toml; the fields mean the same as in its table
    [hosts.NAME]."""

    ssh: Annotated[
        str,
        typer.Option(
            help="Host of your ssh config, or user@address. Default: NAME; with --slurm this "
            "machine, which then has sbatch and the cluster's file system."
        ),
    ] = ""
    slurm: Annotated[
        bool, typer.Option("--slurm", help="A Slurm cluster: --ssh is its login node.")
    ] = False
    partition: Annotated[str, typer.Option(help="Of jobs on a cluster, as sbatch takes it.")] = ""
    account: Annotated[str, typer.Option(help="As sbatch takes it.")] = ""
    qos: Annotated[str, typer.Option(help="As sbatch takes it.")] = ""
    constraint: Annotated[str, typer.Option(help="As sbatch takes it.")] = ""
    gres: Annotated[
        str, typer.Option(help="Kind of device, such as gpu:h100; none for CPUs. Default: gpu.")
    ] = ""
    time_hours: Annotated[
        float, typer.Option(min=0, help="The longest job; a longer run goes on. Default: 24.")
    ] = 0
    cpus: Annotated[int, typer.Option(min=0, help="Cores of a job.")] = 0
    memory_gb: Annotated[float, typer.Option(min=0, help="Memory of a job.")] = 0
    folder: Annotated[str, typer.Option(help="Below your home there. Default: .honesmith-host")] = (
        ""
    )
    python: Annotated[
        str, typer.Option(help="An interpreter there that can train already; its whole path.")
    ] = ""
    runs: Annotated[int, typer.Option(min=0, max=64, help="At once there. Default: 1.")] = 0
    lease_hours: Annotated[
        float, typer.Option(min=0, help="A run ends without a word for so long. Default: 24.")
    ] = 0
    gpu_hour_price: Annotated[float, typer.Option(min=0, help="Of one device.")] = 0
    failover: Annotated[
        str, typer.Option(help="Where its runs go on if it fails: local, or as `compute` says.")
    ] = ""
    ray: Annotated[
        str, typer.Option(metavar="URL", help="Of the Jobs API of a Ray cluster, seen from here.")
    ] = ""
    token_env: Annotated[
        str, typer.Option(help="Variable with the token of a Ray cluster or a SkyPilot server.")
    ] = ""
    resources: Annotated[
        str, typer.Option(help='Of each job of a Ray cluster, such as "h100=1".')
    ] = ""
    without_gpu: Annotated[
        bool, typer.Option("--without-gpu", help="Jobs of a Ray cluster ask for no GPU.")
    ] = False

    sky: Annotated[
        str, typer.Option(metavar="URL", help="Of a SkyPilot API server: rents a machine a run.")
    ] = ""
    token_file: Annotated[str, typer.Option(help="File with the token of a SkyPilot server.")] = ""
    accelerators: Annotated[str, typer.Option(help="To rent, such as H100:1. Default: a CPU.")] = ""
    infra: Annotated[
        str, typer.Option(help="Where to rent, such as runpod or k8s/context. Default: cheapest.")
    ] = ""
    image: Annotated[str, typer.Option(help="Of a rented machine, as SkyPilot's image_id.")] = ""
    spot: Annotated[bool, typer.Option("--spot", help="Rent what may be taken away, for less.")] = (
        False
    )
    max_price: Annotated[
        float, typer.Option(min=0, help="Dollars an hour of one rented machine, at most.")
    ] = 0
    max_hours: Annotated[
        float, typer.Option(min=0, help="A rented machine ends after so long. Default: 24.")
    ] = 0
    disk_gb: Annotated[int, typer.Option(min=0, help="Disk of a rented machine.")] = 0

    def table_values(self) -> dict[str, str | int | float]:
        """Return the keys and values of the table [hosts.NAME] that follow from the options. An
        option that was left out gives no key.

        The options `slurm`, `ray` and `sky` choose the `kind` of a cluster; the value of the last
        two is its `address`. Raises UserError BAD_ARGUMENT if more than one of them was given.
        """
        urls = {"ray": self.ray, "sky": self.sky}
        cluster_options = ["--slurm"] if self.slurm else []
        cluster_options += [f"--{kind}={url}" for kind, url in urls.items() if url]
        if len(cluster_options) > 1:
            raise UserError(
                "BAD_ARGUMENT",
                f"{' and '.join(cluster_options)} are two kinds of cluster, and a host is one",
                hint="Leave one of them out; a machine that is both is added twice, by two names.",
                field="sky" if self.sky else "ray",
            )
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        values = {name: value for name, value in options.items() if value}
        # These options are named otherwise than the keys of the table.
        if values.pop("slurm", False):
            values["kind"] = SLURM
        if "ray" in values:
            values |= {"kind": RAY, "address": values.pop("ray")}
        if "sky" in values:
            values |= {"kind": SKY, "address": values.pop("sky")}
        if values.pop("without_gpu", False):
            values["on_gpu"] = False
        return values


@app.command("list")
@command
def list_hosts(home: HomeFolder = None, as_json: Json = False) -> None:
    """The machines that this home knows, as their last check left them."""
    show(host_verbs.list_hosts(home_of(home)), as_json)


@app.command("add")
@command
def add(name: Name, options: HostOptions, home: HomeFolder = None, as_json: Json = False) -> None:
    """Add a machine of your ssh config, or a cluster; nothing is connected to."""
    values = options.table_values()
    reply = call_with_audit_log(
        home_of(home), "add_host", host_verbs.add_host, name=name, values=values
    )
    show(reply, as_json)


@app.command("setup")
@command
def setup(
    name: Name,
    python: Annotated[str, typer.Option(help="Starts the set-up there. Default: python3.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Build it anew.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Make a machine ready: our environment, with the versions of this one, below one folder."""

    def print_progress(line: str) -> None:
        """Print a line about the set-up on stderr."""
        typer.echo(line, err=True)

    build = partial(host_verbs.set_up_host, say=print_progress)
    with working(f"setting up {name}", as_json):
        reply = call_with_audit_log(
            home_of(home), "set_up_host", build, name=name, python=python, again=again
        )
    show(reply, as_json)


@app.command("check")
@command
def check(name: Name, home: HomeFolder = None, as_json: Json = False) -> None:
    """Look at a machine: what it has, and what of this home runs there."""
    with working(f"asking {name}", as_json):
        reply = call_with_audit_log(home_of(home), "check_host", host_verbs.check_host, name=name)
    show(reply, as_json)


@app.command("remove")
@command
def remove(
    name: Name,
    wipe: Annotated[
        bool, typer.Option("--wipe", help="Delete everything of ours there first.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Forget a machine."""
    reply = call_with_audit_log(
        home_of(home), "remove_host", host_verbs.remove_host, name=name, wipe=wipe
    )
    show(reply, as_json)
