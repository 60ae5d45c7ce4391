"""A host made ready by one command, and looked at.

Nothing is installed over there but below one folder of the user's home, and nothing stays running.
The packages have the versions that this side has, so that a run computes what it computes here.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

from engine.core.errors import UserError
from engine.core.format import counted, size
from engine.core.reply import Reply
from engine.executors import hosts
from engine.executors.attending.attendant import sweep
from engine.executors.attending.pinned import pinned
from engine.executors.attending.places import connected
from engine.executors.far_side import LEAST_PYTHON
from engine.executors.ray.executor import RayExecutor
from engine.executors.sky.executor import SkyExecutor
from engine.executors.slurm.executor import SlurmExecutor
from engine.executors.ssh import FarError, HostLost, HostRefused, Link
from engine.home.config_tables.hosts import NO_GRES, RAY, SKY, SLURM, SSH
from engine.home.run_dir import Home
from engine.home.user_config import Host
from engine.machine.install.setup_env import EXTRAS, GPU_EXTRAS, NEEDED, PROOF
from engine.machine.install.venvs import Say, ignore_line

_INSTALL_S = 3600.0  # seconds that one command of the installation may take
_PROOF_S = 300.0  # seconds that the import of all packages may take
_ANSWER_S = 60  # seconds beyond a command's own limit until its answer must be here
_NODE_S = 3600.0  # seconds that a cluster may take to give a node for a minute
_SYSTEMS = ("Linux", "Darwin")  # as platform.system() names them; Darwin is macOS
_RENAME = "import os, sys; os.replace(sys.argv[1], sys.argv[2])"  # a program for the host's Python
# How much an error quotes: of all, of a command, of the command's output.
_MESSAGE_CHARS, _COMMAND_CHARS, _OUTPUT_CHARS = 800, 200, 500


def set_up(
    home: Home, name: str, *, python: str = "", again: bool = False, say: Say = ignore_line
) -> Reply:
    """Make a host ready for runs: build an environment there and send this program's source.

    Args:
        name: the host's name in config.toml.
        python: the interpreter on the host that starts the set-up; "" for its python3.
        again: whether to build the environment anew if it is there already.
        say: called with each line about what is going on.

    Returns what the host has (`check`). Raises UserError HOST_NOT_FOUND or HOST_UNUSABLE.
    """
    host = hosts.host_of(home, name)
    if host.kind == SKY:  # there is no machine yet: each brings its own environment
        return _checked(home, host, python)
    with _errors_of(host), _files_of(host, python) as link:
        _require_machine(host, link)
        interpreter = host.python or _environment(host, link, again=again, say=say)
        if not _is_only_on_nodes(host):
            _prove(host, link, interpreter)
    say("Sending our own source")
    if host.kind != SSH:
        _look_at_a_node(home, host, interpreter, say)
    return _checked(home, host, interpreter)


def _look_at_a_node(home: Home, host: Host, python: str, say: Say) -> None:
    """Let a job on a cluster find out what its nodes have, and store the answer. `python` is the
    interpreter for the job. Raises UserError HOST_UNUSABLE."""
    say("Asking the cluster for a node, to see what it has")
    with _errors_of(host), connected(home, host, python) as executor:
        assert isinstance(executor, SlurmExecutor | RayExecutor)  # the kind of the host says so
        executor.look_at_a_node(say, _NODE_S)


def check(home: Home, name: str) -> Reply:
    """Connect to a host that was set up, and return what it has and which runs of this home are
    there. What is left there of runs that have ended here is removed. Raises UserError
    HOST_NOT_FOUND or HOST_UNUSABLE."""
    host = hosts.host_of(home, name)
    if host.kind == SKY:
        return _checked(home, host, "")
    return _checked(home, host, hosts.facts_of(home, host).python)


def wipe(home: Home, name: str) -> None:
    """Delete everything that this program has on a host; a rented one is given back. Raises
    UserError HOST_UNUSABLE, also if a run of this home still lives there."""
    host = hosts.host_of(home, name)
    with _errors_of(host):
        if host.kind == SKY:
            with connected(home, host) as executor:
                assert isinstance(executor, SkyExecutor)  # the kind of the host says so
                executor.give_back_all()
            return
        facts = hosts.find_facts(home, host)
        if facts is None:
            with _files_of(host) as link:
                link.call("remove", folder="")
            return
        with connected(home, host, facts.python) as executor:
            living = [job.run_id for job in executor.list_owned() if job.life != "exited"]
            if living:
                message = f"{host.name} still has {', '.join(living)}"
                raise UserError("HOST_UNUSABLE", message, hint="Cancel or wait for them first.")
            executor.link.call("remove", folder="")


def _checked(home: Home, host: Host, python: str) -> Reply:
    """Connect to a host as a run does, and return its reply for `check`: its hardware, its packages
    and the runs of this home there. `python` is the interpreter there; "" for that of its set-up.
    """
    with _errors_of(host), connected(home, host, python) as executor:
        capabilities = executor.capabilities()
        removed = sweep(executor)
        owned = executor.list_owned()
        start = executor.expected_start(1, 0.0) if isinstance(executor, SlurmExecutor) else ""
        can_warn = isinstance(executor, RayExecutor | SkyExecutor)
        warnings = executor.warnings() if can_warn else []
    machine = capabilities.hardware
    devices = ", ".join(f"{d.name} ({size(d.memory_total)})" for d in machine.devices)
    running = [{"run_id": job.run_id, "life": job.life} for job in owned]
    return {
        "summary": f"{host.name} is ready: {devices}; {counted(len(running), 'run')} there.",
        **hosts.shown(home, host),
        "packages": dict(capabilities.packages),
        "disk_free_gb": round(machine.disk_free / 1e9, 1),
        "runs_there": running,
        "removed": removed,
        **({"next_start": start} if start else {}),
        "next": [],
        "warnings": warnings,
    }


def _files_of(host: Host, python: str = "") -> Link:
    """Connect to the place where a host's files are, before anything was set up there.

    The interpreter is the one in the host's table of config.toml if it exists at that place, else
    `python`, else python3.
    """
    configured_python = "" if _is_only_on_nodes(host) else host.python
    return Link(host.ssh, host.folder, configured_python or python or "python3")


@contextlib.contextmanager
def _errors_of(host: Host) -> Iterator[None]:
    """Turn every error of a host in the `with` block into UserError HOST_UNUSABLE, with a hint."""
    try:
        yield
    except HostRefused as error:
        raise UserError("HOST_UNUSABLE", error.message, hint=error.hint) from error
    except HostLost as error:
        raise UserError(
            "HOST_UNUSABLE",
            f"{host.name} is not reached: {error}"[:_MESSAGE_CHARS],
            hint=f"Make `{_trial_command(host)}` work, then call again.",
            retryable=True,
        ) from error
    except FarError as error:
        raise _unusable(host, str(error)) from error


def _trial_command(host: Host) -> str:
    """Return the command with which a person can see whether a host is reached from here."""
    if host.kind == RAY:
        return f"curl {host.ray.address}/api/version"
    if host.kind == SKY:
        return f"curl {host.sky.address}/api/health"
    return f"ssh {host.ssh} true" if host.ssh else "sinfo"


def _is_only_on_nodes(host: Host) -> bool:
    """Tell whether the interpreter in a host's table may exist on the cluster's nodes alone, and
    not where the host's files are written. It can then be tested only by a job on a node."""
    return host.kind == RAY and not host.ssh and bool(host.python)


def _unusable(host: Host, why: str) -> UserError:
    """Return the error for a host that cannot do what it is asked, for the reason `why`."""
    return UserError(
        "HOST_UNUSABLE",
        f"{host.name}: {why}"[:_MESSAGE_CHARS],
        hint=f"Mend that over there, then run `honesmith hosts setup {host.name}` again.",
    )


def _require_machine(host: Host, link: Link) -> None:
    """Raise UserError HOST_UNUSABLE if the machine at the other end of `link` has too old a Python,
    or a system on which this program does not run."""
    version = link.facts.get("version")
    if not isinstance(version, list) or tuple(version[:2]) < LEAST_PYTHON:
        shown = ".".join(str(part) for part in version) if isinstance(version, list) else "?"
        raise UserError(
            "HOST_UNUSABLE",
            f"{host.name} has Python {shown}, and {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} is needed",
            hint=f"Name a newer one: `honesmith hosts setup {host.name} --python /path/python3.12`",
        )
    if link.facts.get("system") not in _SYSTEMS:
        message = f"{host.name} is {link.facts.get('system')}, and Linux or macOS is needed"
        raise UserError("HOST_UNUSABLE", message, hint="Use another machine.")


def _environment(host: Host, link: Link, *, again: bool, say: Say) -> str:
    """Build the environment for training on a host, and return the path of its interpreter there.

    The environment's name is a hash of its packages. One with the same packages that is there is
    used as it is, unless `again`. `say` is called with each line about what is going on. Raises
    UserError HOST_UNUSABLE if the host has too little room or the installation fails.
    """
    on_gpu = _has_gpu(host, link)
    packages = pinned(*EXTRAS, *(GPU_EXTRAS if on_gpu else ()))
    digest = hashlib.sha256("\n".join(packages).encode()).hexdigest()[:12]
    root, folder = str(link.facts["root"]), f"venv-{digest}"
    interpreter = f"{root}/{folder}/bin/python"
    if not again and link.call("exist", folders=[f"{folder}/bin/python"])[0]["there"] == [True]:
        say("The environment is there; --again builds it anew.")
        return interpreter
    needed, free = NEEDED["gpu" if on_gpu else "cpu"], link.facts.get("disk_free", 0)
    if free < needed:
        raise _unusable(host, f"{size(free)} are free and about {size(needed)} are needed")
    aside = f"{folder}.building"  # renamed to `folder` once everything is installed
    link.call("remove", folder=aside)
    say(f"Building the environment on {host.name}: {counted(len(packages), 'package')}")
    _run_there(host, link, [str(link.facts["python"]), "-m", "venv", aside])
    pip = [f"{aside}/bin/python", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    _run_there(host, link, [*pip, *packages])
    link.call("remove", folder=folder)
    _run_there(host, link, [str(link.facts["python"]), "-c", _RENAME, aside, folder])
    return interpreter


def _has_gpu(host: Host, link: Link) -> bool:
    """Tell whether runs on a host are to use GPUs. For a cluster the host's table says so, because
    a login node need not have what its nodes have; any other machine is asked."""
    if host.kind == SLURM:
        return host.slurm.gres != NO_GRES
    if host.kind == RAY:
        return host.ray.on_gpu
    answer, _ = link.call("run", argv=["sh", "-c", "nvidia-smi -L"], limit_s=60.0)
    return answer.get("status") == 0


def _run_there(host: Host, link: Link, argv: Sequence[str]) -> None:
    """Run a command of the set-up on a host, in the root. Raises UserError HOST_UNUSABLE with the
    end of what it printed if it fails."""
    timeout_s = _INSTALL_S + _ANSWER_S
    answer, _ = link.call("run", timeout_s=timeout_s, argv=list(argv), limit_s=_INSTALL_S)
    if answer.get("status") != 0:
        output = str(answer.get("output"))[-_OUTPUT_CHARS:]
        raise _unusable(host, f"{' '.join(argv)[:_COMMAND_CHARS]}: {output}")


def _prove(host: Host, link: Link, interpreter: str) -> None:
    """Raise UserError HOST_UNUSABLE if the interpreter on a host cannot import the packages that
    training needs."""
    argv = [interpreter, "-P", "-c", PROOF.replace(", gguf", "")]  # hosts import no GGUF files
    answer, _ = link.call("run", timeout_s=_PROOF_S + _ANSWER_S, argv=argv, limit_s=_PROOF_S)
    if answer.get("status") != 0:
        output = str(answer.get("output"))[-_OUTPUT_CHARS:]
        raise _unusable(host, f"{interpreter} cannot train: {output}")
