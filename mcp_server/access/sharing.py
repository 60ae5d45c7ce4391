"""Sharing: what a key, or the local user, lets other keys see and use.

Shared are runs and plans, environments and datasets (all versions of a name, or one version) and
deployments. Whom something is shared with sees it; only the owner may change or stop it.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.home.rows import LOCAL
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.owners import EVERYONE, May, Share
from mcp_server.access.keys import NAME, list_keys

MAY: tuple[May, ...] = ("read", "use")
MAX_GRANTEES = 100  # in one call: each is a transaction


def share(
    home: Home, name: str, grantees: Sequence[str] = (), may: str = "read", stop: bool = False
) -> Reply:
    """Share something with keys, or stop sharing it, and return what it is shared with now.

    Args:
        home: the home as the owner sees it; the local user may share what belongs to anybody.
        name: a run or plan, an environment (`booking`: all its versions, also later ones;
            `booking@3f9c01...`: one) or a deployment.
        grantees: names of keys; empty for all keys.
        may: "read", or "use": also train from it, evaluate, deploy, curate, chat.
        stop: share it no more, with these keys or (if `grantees` is empty) with anybody.

    Raises:
        UserError: BAD_ARGUMENT if there is no such thing among what the caller owns, or if `may` is
            neither.
    """
    if may not in MAY:
        raise UserError(
            "BAD_ARGUMENT", f"may={may[:40]!r} cannot be used", hint="Use read or use.", field="may"
        )
    _check_grantees(grantees)
    owned = _owned_by_caller(home)
    with Store(owned) as store:
        kind, full_name, owner = _find(store, name)
        ids = _ids_of(home, grantees)
        if stop:
            for grantee in ids if grantees else [""]:
                store.remove_shares(kind, full_name, owner, grantee)
        else:
            for grantee in ids:
                store.add_share(Share(kind, full_name, owner, grantee, may))
        shares = [one for one in store.list_shares() if (one.kind, one.name) == (kind, full_name)]
    shown = [_shown(one) for one in shares if one.owner == owner]
    with_whom = ", ".join(f"{one['with']} ({one['may']})" for one in shown) or "nobody"
    return {
        "name": full_name,
        "kind": kind,
        "shares": shown,
        "summary": f"{full_name} is shared with {with_whom}.",
        "next": [],
        "warnings": [],
    }


def list_shares(home: Home) -> Reply:
    """Return what the caller shares; the local user sees what everybody does."""
    with Store(home) as store:
        shares = [_shown(one) for one in store.list_shares()]
    return {
        "shares": shares,
        "summary": f"{len(shares)} things are shared.",
        "next": [],
        "warnings": [],
    }


def _owned_by_caller(home: Home) -> Home:
    """Return the home in which the caller sees only what it may change."""
    return home if home.viewer is None else replace(home, viewer=replace(home.viewer, may="change"))


def _find(store: Store, name: str) -> tuple[str, str, str]:
    """Return kind, full name and owner of what `name` means. Raises UserError BAD_ARGUMENT if
    nothing that the caller owns has this name."""
    runs = store.plan_runs(name)
    if runs:
        return "run", name, runs[0].owner
    if store.sees_run(name):
        return "run", name, store.get_run(name).owner
    with contextlib.suppress(UserError):  # there is no such deployment
        return "deployment", name, store.get_deployment(name).owner
    versions = store.find_env(name)
    plain = name.rpartition("/")[2]
    for version in versions:
        if plain in (version.env_id, version.name):
            return "env", plain, version.owner
    raise UserError(
        "BAD_ARGUMENT",
        f"nothing of yours is called {name[:80]!r}",
        hint="Give the whole id of a run, plan or deployment, or the name of an environment.",
        field="name",
    )


def _check_grantees(names: Sequence[str]) -> None:
    """Raise UserError BAD_ARGUMENT for more names than a call may have, or what is no name."""
    unnamed = [name for name in names if not NAME.fullmatch(name)]
    if unnamed or len(names) > MAX_GRANTEES:
        fault = f"{unnamed[0][:60]!r} is no name of a key" if unnamed else f"{len(names)} names"
        raise UserError(
            "BAD_ARGUMENT",
            fault,
            hint=f"Name up to {MAX_GRANTEES} keys, or none for all keys.",
            field="with",
        )


def _ids_of(home: Home, names: Sequence[str]) -> list[str]:
    """Return the ids of the keys with these names; [`EVERYONE`] for no name.

    Only the local user is told that a key does not exist: others are not told which keys there are.
    """
    if not names:
        return [EVERYONE]
    id_by_name = {key.name: key.id for key in list_keys(home)}
    unknown = [name for name in names if name not in id_by_name]
    if unknown and home.viewer is None:
        raise UserError(
            "BAD_ARGUMENT",
            f"there is no key {unknown[0][:60]!r}",
            hint=f"Keys of this home: {', '.join(id_by_name) or 'none'}.",
            field="with",
        )
    return [id_by_name.get(name, name) for name in names]


def _shown(one: Share) -> dict[str, str]:
    """Return a share as a reply shows it."""
    return {
        "name": one.name,
        "kind": one.kind,
        "owner": one.owner or LOCAL,
        "with": "all keys" if one.grantee == EVERYONE else one.grantee,
        "may": one.may,
    }
