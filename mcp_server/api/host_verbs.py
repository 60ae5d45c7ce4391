"""The verbs of the command line about other machines: one engine function each.

Engine modules are imported inside them, as in `verbs.py` and for its reason.
"""
# ruff: noqa: PLC0415

from engine.core.format import counted
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.machine.install.venvs import Say, ignore_line


def list_hosts(home: Home) -> Reply:
    """Return the machines and clusters of config.toml that runs can use, as a reply with the list
    `hosts`. Each is described as its last check found it; nothing is connected to now. Raises
    UserError SETTING_* if config.toml is damaged."""
    from engine.executors import hosts

    shown_hosts = [hosts.shown(home, host) for host in home.user_config().hosts.values()]
    return {"summary": f"{counted(len(shown_hosts), 'host')}.", "hosts": shown_hosts}


def add_host(home: Home, name: str, values: dict[str, str | int | float]) -> Reply:
    """Add a machine to config.toml, without connecting to it. `values` are the keys and values of
    its table [hosts.NAME].

    Raises UserError BAD_ARGUMENT if the name is taken, SETTING_INVALID if the name or a value
    cannot be used.
    """
    from engine.executors import hosts

    host = hosts.add_host(home, name, values)
    return {
        "summary": f"{name} is added: {host.in_words}, runs go there with compute = "
        f'"{host.compute}". Make it ready: honesmith hosts setup {name}',
        **hosts.shown(home, host),
        "warnings": list(host.warnings),
    }


def set_up_host(
    home: Home, name: str, python: str = "", again: bool = False, say: Say = ignore_line
) -> Reply:
    """Build our Python environment on a machine over SSH, and send our source there.

    Args:
        home: the home whose config.toml names the machine.
        name: the name of the machine in config.toml.
        python: the interpreter on the machine that starts the set-up; "": the default.
        again: build the environment anew, although there is one.
        say: called with each line about the progress.

    Raises UserError HOST_* if the machine cannot be reached or used.
    """
    from engine.executors.attending import host_setup

    return host_setup.set_up(home, name, python=python, again=again, say=say)


def check_host(home: Home, name: str) -> Reply:
    """Return what a machine has and which runs of this home are there, and delete there what runs
    left that have ended here. Raises UserError HOST_* if it cannot be reached or used."""
    from engine.executors.attending import host_setup

    return host_setup.check(home, name)


def remove_host(home: Home, name: str, wipe: bool = False) -> Reply:
    """Take a machine out of config.toml; with `wipe`, first delete everything of ours there.

    Raises UserError HOST_NOT_FOUND if there is no such machine, HOST_UNUSABLE if it cannot be
    reached to wipe it, RUN_STATE while a run of this home is there.
    """
    from engine.executors import hosts
    from engine.executors.attending import host_setup

    hosts.refuse_while_used(home, name)
    if wipe:  # before the removal: afterwards the address of the machine is not known any more
        host_setup.wipe(home, name)
    hosts.remove_host(home, name)
    what_was_done = (
        "and everything of ours there is deleted" if wipe else "and nothing was changed there"
    )
    return {"summary": f"{name} is taken out of config.toml, {what_was_done}.", "host": name}
