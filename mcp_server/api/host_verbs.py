"""The verbs of the command line about other machines: one engine function each.

Engine modules are imported inside them, as in `verbs.py` and for its reason.
"""
# ruff: noqa: PLC0415

from engine.core.format import counted
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.machine.install.venvs import Say, ignore_line


def list_hosts(home: Home) -> Reply:
    """List the machines and clusters of config.toml that runs can use, each as its last check found
    it. Raises UserError SETTING_* if config.toml is damaged."""
    from engine.executors import hosts

    shown_hosts = [hosts.shown(home, host) for host in home.user_config().hosts.values()]
    return {"summary": f"{counted(len(shown_hosts), 'host')}.", "hosts": shown_hosts}


def add_host(home: Home, name: str, values: dict[str, str | int | float]) -> Reply:
    """Add a machine to config.toml, without connecting to it.

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
    """Build our environment on a machine over SSH, and send our source there. `say` gets each line
    about the progress. Raises UserError HOST_* if the machine cannot be reached or used."""
    from engine.executors.attending import host_setup

    return host_setup.set_up(home, name, python=python, again=again, say=say)


def check_host(home: Home, name: str) -> Reply:
    """Look at a machine, and remove there what has ended here. Raises UserError HOST_*."""
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
    if wipe:
        host_setup.wipe(home, name)
    hosts.remove_host(home, name)
    what_was_done = (
        "and everything of ours there is deleted" if wipe else "and nothing was changed there"
    )
    return {"summary": f"{name} is taken out of config.toml, {what_was_done}.", "host": name}
