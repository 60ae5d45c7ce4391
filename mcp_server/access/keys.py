"""Keys of the HTTP server: further bearer tokens, each with a name, scopes and quotas.

The home holds their digests only (`keys.json`, mode 0600); a token is shown once, when it is made.
The token of the first start is the owner's: it may do everything, as stdio may.
"""

import contextlib
import hashlib
import hmac
import itertools
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from engine.core.errors import UserError
from engine.core.files import read_json, take_lock, write_json
from engine.home.run_dir import Home
from engine.home.team.owners import PRIORITIES, May, Viewer
from engine.home.user_config import PREFIX

if TYPE_CHECKING:
    import anyio

    from envs.config.settings import EnvSettings

Scope = Literal["read", "train", "install", "deploy", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
OWNER = "owner"
STDIO = "stdio"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
RESERVED_NAMES = (OWNER, STDIO, "local")  # callers without a stored key
CALLS_PER_MINUTE = 600
DEPLOYMENTS = 2
OWNER_CALLS_PER_MINUTE = 60_000  # only a program that calls in an endless loop reaches this
MAX_REQUEST_ID = 200  # characters that the engine takes
LOCK_S = 30.0  # the longest wait for a lock
POLL_S = 0.01  # between two attempts to take a lock


@dataclass(frozen=True)
class Key:
    """A caller of the server, and what that caller may do.

    Args:
        name: name of the key in the audit log.
        scopes: any of read, train, install, deploy; with admin the others hold for what belongs to
            anybody, without it for what is the key's own or shared with it.
        digest: SHA-256 of its token in hex; "" for the owner and for stdio.
        created: unix seconds.
        expires: unix seconds from which the key is refused; 0: never.
        calls_per_minute: HTTP requests; 0: no limit.
        max_runs: how many of its runs may be open at once; 0: no limit.
        gpu_hours_per_day: device hours its runs may take in 24 hours; 0: no limit.
        max_deployments: processes that serve models for it at once; 0: no limit.
        id: to whom belongs what the key makes. It stays when the token is changed, and no other key
            of this home ever gets it. "" for the owner and for stdio.
        project: the project whose budget its runs also count for; "" for none.
        max_gpu_hours: device hours that all its runs together may take; 0: no limit.
        priority: of its runs in the queue, one of `PRIORITIES`.
    """

    name: str
    scopes: tuple[Scope, ...] = SCOPES
    digest: str = ""
    created: float = 0.0
    expires: float = 0.0
    calls_per_minute: int = CALLS_PER_MINUTE
    max_runs: int = 0
    gpu_hours_per_day: float = 0.0
    max_deployments: int = DEPLOYMENTS
    id: str = ""
    project: str = ""
    max_gpu_hours: float = 0.0
    priority: str = "normal"

    @property
    def caller_id(self) -> str:
        """The id of the key; for the owner and for stdio, which have no id, the name."""
        return self.id or self.name

    @property
    def quota_group(self) -> str:
        """The name of the lock that is held while the quota of this key is checked.

        The keys of a project share one lock, because they share a budget. The lock of a project
        cannot have the name of a key, because names have no colon.
        """
        return f"project:{self.project}" if self.project else self.name

    def viewer(self, may: May) -> Viewer | None:
        """Return the viewer with which a call by this key opens the home: unless the key has the
        scope admin, it limits the call to what the key owns or what is shared with it. Returns
        None, no limit, for the owner.

        `may` is what the call does with the things that it names: read, use or change.
        """
        if self.is_owner:
            return None
        sees_all = "admin" in self.scopes
        return Viewer(self.caller_id, may, sees_all, self.project, self.priority)

    @property
    def is_owner(self) -> bool:
        """Whether the caller is the person who runs the server, who may do and see everything."""
        return self.name in (OWNER, STDIO)

    @property
    def is_limited(self) -> bool:
        """Whether a quota may apply to the key: it has a limit of open runs or of GPU-hours, or it
        belongs to a project, whose hours may be limited."""
        return bool(self.max_runs or self.gpu_hours_per_day or self.max_gpu_hours or self.project)

    def require(self, scope: Scope, action: str) -> None:
        """Raise UserError FORBIDDEN unless this key has `scope`.

        `action` is the tool or method that needs the scope; the error message begins with it.
        """
        if scope not in self.scopes:
            raise UserError(
                "FORBIDDEN",
                f"{action} needs the scope {scope}; "
                f"the key {self.name} has {', '.join(self.scopes)}",
                hint="Ask the person who runs this server for a key with that scope "
                f"(honesmith key add NAME --scope {scope}).",
            )


# The caller over stdio and in a shell, who may do everything.
LOCAL = Key(STDIO, max_deployments=0)  # 0: no limit


class Keys:
    """The keys of a home. If the key file changes, the next request already uses the new keys.

    Args:
        home: the home whose `keys.json` is read.
        token: the owner's token.
        clock: returns the present time in unix seconds.
    """

    def __init__(self, home: Home, token: str, clock: Callable[[], float] = time.time) -> None:
        """Start with the owner's key only; the file is read by the first call of `find`."""
        self._home = home
        self._owner = Key(
            OWNER,
            digest=digest(token),
            calls_per_minute=OWNER_CALLS_PER_MINUTE,
            max_deployments=0,  # no limit
        )
        self._clock = clock
        # Change time, inode and size of the file when it was last read; () if it does not exist.
        self._file_state: tuple[int, ...] = ()
        self._keys: list[Key] = []

    def find(self, token: bytes) -> Key | None:
        """Return the key that has this token; None if no key has it, or if the key has expired.

        The loop does not stop at a match, and each comparison takes constant time, so the duration
        of the search tells nothing about a token.
        """
        token_digest = hashlib.sha256(token).hexdigest()
        matching_key = None
        for key in (self._owner, *self._stored_keys()):
            if hmac.compare_digest(key.digest, token_digest):
                matching_key = key
        if matching_key is None:
            return None
        # expires is 0 for a key that never expires.
        if matching_key.expires and matching_key.expires <= self._clock():
            return None
        return matching_key

    def _stored_keys(self) -> list[Key]:
        """Return the keys in the file, which is read only if it changed since the last call.

        The list is empty if the file does not exist, cannot be read, or is damaged.
        """
        try:
            stat = os.stat(self._home.keys)
        except OSError:
            self._file_state = ()
            self._keys = []
            return []
        file_state = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if file_state != self._file_state:
            try:
                self._keys = list_keys(self._home)
            except UserError:  # the file is damaged: no key is valid, `honesmith key list` says why
                self._keys = []
            self._file_state = file_state
        return self._keys


def digest(token: str) -> str:
    """Return the SHA-256 of a text in hex. The key file stores only this digest of a token.

    A token has 256 random bits and cannot be guessed, so no slower hash is needed.
    """
    return hashlib.sha256(token.encode()).hexdigest()


def list_keys(home: Home) -> list[Key]:
    """Return the keys of `home`, oldest first; [] if the file does not exist.

    Raises:
        UserError: HOME_UNUSABLE if the file cannot be read or is damaged.
    """
    return list(_read_file(home).keys)


@dataclass(frozen=True)
class KeyFile:
    """The content of the key file.

    Attributes:
        keys: oldest first.
        retired: ids of keys that were removed; what they made still belongs to them.
        projects: project -> device hours that the runs of its keys may take together; 0: no limit.
    """

    keys: tuple[Key, ...] = ()
    retired: tuple[str, ...] = ()
    projects: Mapping[str, float] = field(default_factory=dict)


def _read_file(home: Home) -> KeyFile:
    """Read the key file; a file that does not exist has no keys.

    Raises:
        UserError: HOME_UNUSABLE if the file cannot be read or is damaged.
    """
    try:
        content = read_json(home.keys)
        projects = {str(name): float(hours) for name, hours in content.get("projects", {}).items()}
        return KeyFile(
            keys=tuple(_key_from_row(row) for row in content["keys"]),
            retired=tuple(str(owner) for owner in content.get("retired", ())),
            projects=projects,
        )
    except FileNotFoundError:
        return KeyFile()
    # ValueError: not JSON. The others: a field is missing or of a wrong type.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "HOME_UNUSABLE",
            f"the keys {home.keys} cannot be read: {error}",
            hint="Correct the file, or delete it and add the keys again.",
        ) from error


def _key_from_row(row: Mapping[str, Any]) -> Key:
    """Make a `Key` from one entry of the key file.

    Fields and scopes that this version of the program does not know are ignored: a later version
    may have written them.
    """
    known_fields = {field.name for field in fields(Key)}
    key = Key(**{name: value for name, value in row.items() if name in known_fields})
    known_scopes = tuple(scope for scope in SCOPES if scope in row["scopes"])
    # A key that was made before keys had ids has its name as id.
    return replace(key, scopes=known_scopes, id=key.id or key.name)


def add_key(
    home: Home, name: str, scopes: Sequence[str], *, days: float = 0.0, **limits: Any
) -> tuple[Key, str]:
    """Make a key, store it, and return the key and its token. Only a digest of the token is stored.

    Args:
        home: the home for whose server the key is made.
        name: up to 40 characters, not in use by another key.
        scopes: any of `SCOPES`.
        days: days until the key expires; 0: never.
        limits: further fields of `Key`: calls_per_minute, max_runs, gpu_hours_per_day,
            max_deployments, project, max_gpu_hours, priority.

    Raises:
        UserError: BAD_ARGUMENT if a name is not allowed or in use, a scope or the priority is
            unknown. HOME_UNUSABLE if the keys cannot be read or locked.
    """
    _check_name_and_scopes(name, scopes)
    _check_project_and_priority(limits.get("project", ""), limits.get("priority", "normal"))
    token = secrets.token_urlsafe(32)
    now = time.time()
    key = Key(
        name=name,
        scopes=tuple(scope for scope in SCOPES if scope in scopes),  # each once, in fixed order
        digest=digest(token),
        created=now,
        expires=now + days * 86_400 if days else 0.0,
        **limits,
    )
    return _store_new_key(home, key), token


def rotate_key(home: Home, name: str) -> tuple[Key, str]:
    """Give the key of that name a new token, and return the key and the token. The old token is
    refused from its next request on; what the key owns stays its own.

    Raises:
        UserError: BAD_ARGUMENT if there is no such key. HOME_UNUSABLE if the keys cannot be read or
            locked.
    """
    token = secrets.token_urlsafe(32)
    with hold_keys_lock(home):
        content = _read_file(home)
        key = replace(_named_key(content, name), digest=digest(token))
        # The same keys in the same order, the one with the new token in its old place.
        keys = tuple(key if stored.name == name else stored for stored in content.keys)
        _write_file(home, replace(content, keys=keys))
    return key, token


def set_project(home: Home, project: str, max_gpu_hours: float) -> None:
    """Set the device hours that the runs of all keys of a project may take together; 0 for no
    limit. Raises UserError BAD_ARGUMENT if `project` cannot be a name."""
    if not NAME.fullmatch(project):
        raise _bad_argument("project", project, "Use up to 40 of a-z, 0-9, dot, - and _.")
    with hold_keys_lock(home):
        content = _read_file(home)
        projects = {**content.projects, project: max_gpu_hours}
        _write_file(home, replace(content, projects=projects))


def projects_of(home: Home) -> Mapping[str, float]:
    """Return project -> device hours that the runs of its keys may take together (0: no limit).
    Raises UserError HOME_UNUSABLE if the keys cannot be read."""
    return _read_file(home).projects


def _check_project_and_priority(project: str, priority: str) -> None:
    """Raise UserError BAD_ARGUMENT if `project` cannot be a name ("": no project, is allowed), or
    if the priority is unknown."""
    if project and not NAME.fullmatch(project):
        raise _bad_argument("project", project, "Use up to 40 of a-z, 0-9, dot, - and _.")
    if priority not in PRIORITIES:
        raise _bad_argument("priority", priority, f"Choose of {', '.join(PRIORITIES)}.")


def _check_name_and_scopes(name: str, scopes: Sequence[str]) -> None:
    """Raise UserError BAD_ARGUMENT if `name` cannot be the name of a key, or if one of `scopes` is
    unknown."""
    if not NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise _bad_argument(
            "name", name, "Use up to 40 of a-z, 0-9, dot, - and _; not owner, stdio or local."
        )
    for scope in scopes:
        if scope not in SCOPES:
            raise _bad_argument("scope", scope, f"Choose of {', '.join(SCOPES)}.")


def _store_new_key(home: Home, key: Key) -> Key:
    """Give `key` a new id, add it to the key file of the home, and return the key with its id.

    Raises:
        UserError: BAD_ARGUMENT if the file has a key of that name already. HOME_UNUSABLE if the
            keys cannot be read or locked.
    """
    with hold_keys_lock(home):
        content = _read_file(home)
        if any(existing.name == key.name for existing in content.keys):
            raise _bad_argument(
                "name",
                key.name,
                f"There is a key of that name: honesmith key remove {key.name}; a new token for "
                f"it: honesmith key rotate {key.name}.",
            )
        key = replace(key, id=_new_id(content, key.name))
        _write_file(home, replace(content, keys=(*content.keys, key)))
    return key


def _new_id(content: KeyFile, name: str) -> str:
    """Return an id for a new key called `name` that no key of the home has or had.

    The id is the name with dashes for dots, because a dot ends the id of the key within the id of a
    run. If that id is taken, it gets a number, e.g. "night-2".
    """
    taken_ids = {*content.retired, *(key.id for key in content.keys), *RESERVED_NAMES}
    stem = name.replace(".", "-")
    if stem not in taken_ids:
        return stem
    numbered_ids = (f"{stem}-{number}" for number in itertools.count(2))
    return next(candidate for candidate in numbered_ids if candidate not in taken_ids)


def _named_key(content: KeyFile, name: str) -> Key:
    """Return the key in `content` that is called `name`. Raises UserError BAD_ARGUMENT if there is
    none."""
    for key in content.keys:
        if key.name == name:
            return key
    known_names = ", ".join(key.name for key in content.keys) or "none"
    raise _bad_argument("name", name, f"Keys of this home: {known_names}.")


def remove_key(home: Home, name: str) -> None:
    """Delete the key of that name; running servers refuse its next request.

    What the key owns stays. Its id is remembered, so that no later key gets that id, and with it
    what this key owns.

    Raises:
        UserError: BAD_ARGUMENT if there is no such key. HOME_UNUSABLE if the keys cannot be read or
            locked.
    """
    with hold_keys_lock(home):
        content = _read_file(home)
        removed = _named_key(content, name)
        remaining = tuple(key for key in content.keys if key.name != name)
        retired = (*content.retired, removed.id)
        _write_file(home, replace(content, keys=remaining, retired=retired))


def check_owner_agreed(home: Home, key: Key, settings: "EnvSettings") -> None:
    """Check that an environment which `key` pushes asks only for what the owner has agreed to.

    Three things need the owner's agreement, in the home's config.toml:
    - secrets: values of this server's environment variables; `key_secrets` lists those allowed.
    - a network, over which secrets could be sent; `key_network` allows it.
    - models behind a URL that it asks; `shared` in their table allows it.
    The owner may push anything.

    Raises:
        UserError: FORBIDDEN, naming what is refused and the lines of config.toml that would allow
            it.
    """
    if key.is_owner:
        return
    config = home.user_config()
    refused_secrets = [name for name in settings.secrets if name not in config.key_secrets]
    refusals = [f"the secret {name}" for name in refused_secrets]
    config_lines = []  # lines of config.toml that would allow what is refused
    if refused_secrets:
        # The line replaces the present one, so it repeats the secrets that are allowed already.
        quoted_names = ", ".join(f'"{name}"' for name in (*config.key_secrets, *refused_secrets))
        config_lines.append(f"key_secrets = [{quoted_names}]")
    if settings.network and not config.key_network:
        refusals.append("a network")
        config_lines.append("key_network = true")
    for reference in settings.endpoints:  # such as "openai:NAME", a model behind a URL
        name = reference.removeprefix(PREFIX)
        if name in config.endpoints and not config.endpoints[name].shared:
            refusals.append(f"the model {reference}")
            config_lines.append(f"shared = true in [endpoints.{name}]")
    if refusals:
        raise _not_agreed(key, refusals, config_lines)


def _not_agreed(key: Key, refusals: Sequence[str], config_lines: Sequence[str]) -> UserError:
    """Make the FORBIDDEN error for an environment that asks for something without the agreement of
    the owner.

    Args:
        key: the caller.
        refusals: what is refused, such as "a network".
        config_lines: the lines of config.toml that would allow it.
    """
    return UserError(
        "FORBIDDEN",
        f"environment.toml asks for {' and '.join(refusals)}; the owner of this home has not "
        f"agreed that keys such as {key.name} give that to an environment",
        hint="Leave it out, or ask the owner to push this folder or to set "
        f"{' and '.join(config_lines)} in the home's config.toml.",
        field="path",
    )


def stored_request_id(key: Key, request_id: str) -> str:
    """Return the id under which a `request_id` of `key` is stored, such as `night:try-1`.

    The stored id begins with the id of the key, so that two keys may use the same `request_id`.
    If that makes the id longer than `MAX_REQUEST_ID` characters, it holds the digest of
    `request_id` instead. Three kinds of ids are returned unchanged: those of the owner, "" (none
    was given), and those that are too long by themselves, which the engine refuses.
    """
    if key.is_owner or not request_id or len(request_id) > MAX_REQUEST_ID:
        return request_id
    stored_id = f"{key.caller_id}:{request_id}"
    if len(stored_id) > MAX_REQUEST_ID:
        stored_id = f"{key.caller_id}:{digest(request_id)}"
    return stored_id


@contextlib.contextmanager
def hold_keys_lock(home: Home) -> Iterator[None]:
    """Hold the lock on the keys of a home, across processes, while the block runs.

    Raises:
        UserError: HOME_UNUSABLE if another process has held the lock for `LOCK_S` seconds.
    """
    lock = take_lock(home.keys_lock, wait_s=LOCK_S)
    if lock is None:
        raise UserError(
            "HOME_UNUSABLE",
            f"{home.keys_lock} is held by another process",
            hint="Call again.",
            retryable=True,
        )
    try:
        yield
    finally:
        os.close(lock)


@contextlib.asynccontextmanager
async def hold_quota_lock(home: Home, key: Key, process_lock: "anyio.Lock") -> AsyncIterator[None]:
    """Hold the lock on the quota of a key, across processes, while the block runs.

    Args:
        home: the home that holds the lock file.
        key: the key whose quota is counted.
        process_lock: a lock for this key within this process, so that only one of the waiting calls
            polls the lock file. Waiting takes no thread.

    Raises:
        UserError: HOME_UNUSABLE if the lock was not free within `LOCK_S` seconds.
    """
    # Imported late: every shell command imports this module, and none needs anyio.
    import anyio  # noqa: PLC0415

    with contextlib.ExitStack() as cleanup:  # releases the locks that were taken
        file_lock = None
        with anyio.move_on_after(LOCK_S):  # if the time is up first, `file_lock` is still None
            await process_lock.acquire()
            cleanup.callback(process_lock.release)
            file_lock = take_lock(home.quota_lock(key.quota_group))
            while file_lock is None:
                await anyio.sleep(POLL_S)
                file_lock = take_lock(home.quota_lock(key.quota_group))
        if file_lock is None:  # other calls of this key held a lock all that time
            raise UserError(
                "HOME_UNUSABLE",
                f"calls of the key {key.name} that start runs have waited {LOCK_S:g} s for others",
                hint="Call again.",
                retryable=True,
            )
        cleanup.callback(os.close, file_lock)
        yield


def _write_file(home: Home, content: KeyFile) -> None:
    """Replace the key file of the home by `content`, whose empty parts are left out."""
    stored: dict[str, object] = {"keys": [asdict(key) for key in content.keys]}
    if content.retired:
        stored["retired"] = list(content.retired)
    if content.projects:
        stored["projects"] = dict(content.projects)
    write_json(home.keys, stored)


def _bad_argument(field: str, value: str, hint: str) -> UserError:
    """Make the BAD_ARGUMENT error for the argument `field`, whose `value` cannot be used. A long
    value is cut to 60 characters; `hint` says what can be used."""
    return UserError(
        "BAD_ARGUMENT", f"{field}={value[:60]!r} cannot be used", hint=hint, field=field
    )
