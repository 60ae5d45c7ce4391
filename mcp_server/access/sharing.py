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

SHARE_RIGHTS: tuple[May, ...] = ("read", "use")
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
    if may not in SHARE_RIGHTS:
        raise UserError(
            "BAD_ARGUMENT", f"may={may[:40]!r} cannot be used", hint="Use read or use.", field="may"
        )
    _check_grantees(grantees)
    with Store(_only_owned(home)) as store:
        kind, full_name, owner = _find_shareable(store, name)
        grantee_ids = _ids_of_grantees(home, grantees)
        if stop:
            # For the store, "" means every grantee.
            for grantee_id in grantee_ids if grantees else [""]:
                store.remove_shares(kind, full_name, owner, grantee_id)
        else:
            for grantee_id in grantee_ids:
                store.add_share(Share(kind, full_name, owner, grantee_id, may))
        remaining_shares = [
            _share_entry(entry)
            for entry in store.list_shares()
            if (entry.kind, entry.name, entry.owner) == (kind, full_name, owner)
        ]
    with_whom = ", ".join(f"{entry['with']} ({entry['may']})" for entry in remaining_shares)
    return {
        "name": full_name,
        "kind": kind,
        "shares": remaining_shares,
        "summary": f"{full_name} is shared with {with_whom or 'nobody'}.",
        "next": [],
        "warnings": [],
    }


def list_shares(home: Home) -> Reply:
    """Return what the caller shares, as a reply with the list `shares`. The local user gets what
    everybody shares."""
    with Store(home) as store:
        shares = [_share_entry(entry) for entry in store.list_shares()]
    return {
        "shares": shares,
        "summary": f"{len(shares)} things are shared.",
        "next": [],
        "warnings": [],
    }


def _only_owned(home: Home) -> Home:
    """Return the home in which the caller sees only what it may change, which is what it owns. The
    local user (a home without a viewer) may change everything."""
    if home.viewer is None:
        return home
    return replace(home, viewer=replace(home.viewer, may="change"))


def _find_shareable(store: Store, name: str) -> tuple[str, str, str]:
    """Find the run, plan, deployment or environment that is called `name`, in this order.

    Returns its kind ("run" for a plan too), its full name and the id of its owner. Raises UserError
    BAD_ARGUMENT if the caller owns nothing of this name.
    """
    runs = store.plan_runs(name)
    if runs:
        return "run", name, runs[0].owner
    if store.sees_run(name):
        return "run", name, store.get_run(name).owner
    with contextlib.suppress(UserError):  # there is no such deployment
        return "deployment", name, store.get_deployment(name).owner
    name_without_owner = name.rpartition("/")[2]  # an environment may be named OWNER/NAME
    for version in store.find_env(name):
        if name_without_owner in (version.env_id, version.name):
            return "env", name_without_owner, version.owner
    raise UserError(
        "BAD_ARGUMENT",
        f"nothing of yours is called {name[:80]!r}",
        hint="Give the whole id of a run, plan or deployment, or the name of an environment.",
        field="name",
    )


def _check_grantees(names: Sequence[str]) -> None:
    """Raise UserError BAD_ARGUMENT if one of `names` cannot be the name of a key, or if there are
    more than `MAX_GRANTEES` of them."""
    invalid_names = [name for name in names if not NAME.fullmatch(name)]
    if invalid_names or len(names) > MAX_GRANTEES:
        fault = f"{len(names)} names"
        if invalid_names:
            fault = f"{invalid_names[0][:60]!r} is no name of a key"
        raise UserError(
            "BAD_ARGUMENT",
            fault,
            hint=f"Name up to {MAX_GRANTEES} keys, or none for all keys.",
            field="with",
        )


def _ids_of_grantees(home: Home, names: Sequence[str]) -> list[str]:
    """Return the ids of the keys with these names; [`EVERYONE`], which is all keys, for no name.

    Only the local user (no viewer) gets an error for an unknown name, because others must not learn
    which keys there are. For them, the name itself stands as the id.
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


def _share_entry(share: Share) -> dict[str, str]:
    """Return the entry of a reply that describes `share`: what is shared, by whom, with whom, and
    whether it may be read or also used."""
    return {
        "name": share.name,
        "kind": share.kind,
        "owner": share.owner or LOCAL,  # "": what was made without a key is the local user's
        "with": "all keys" if share.grantee == EVERYONE else share.grantee,
        "may": share.may,
    }
