"""Keys of the HTTP server: further bearer tokens, each with a name, scopes and quotas.

The home holds their digests only (`keys.json`, mode 0600); a token is shown once, when it is made.
The token of the first start is the owner's: it may do everything, as stdio may.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from engine.core.errors import UserError
from engine.core.files import read_json, take_lock, write_json
from engine.home.run_dir import Home

if TYPE_CHECKING:
    import anyio

    from envs.config.settings import EnvSettings

Scope = Literal["read", "train", "install", "deploy"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
OWNER = "owner"
STDIO = "stdio"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
CALLS_PER_MINUTE = 600
DEPLOYMENTS = 2
OWNER_CALLS_PER_MINUTE = 60_000  # no agent gets there; a loop that went wild does
REQUEST_ID = 200  # characters that the engine takes
LOCK_S = 30.0
POLL_S = 0.01


@dataclass(frozen=True)
class Key:
    """Who calls, and what that key may do.

    Args:
        name: as the audit log calls it.
        scopes: of read, train, install, deploy.
        digest: SHA-256 of its token in hex; "" for the owner and for stdio.
        created: unix seconds.
        expires: unix seconds from which it is refused; 0: never.
        calls_per_minute: HTTP requests; 0: as many as it likes.
        max_runs: runs of its own that may be open at once; 0: any number.
        gpu_hours_per_day: device hours its runs may take in 24 hours; 0: no limit.
        max_deployments: processes that serve models for it at once; 0: any number.
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

    @property
    def is_owner(self) -> bool:
        """Whether this is who runs the server, who may do and see everything."""
        return self.name in (OWNER, STDIO)

    @property
    def is_limited(self) -> bool:
        """Whether starting runs is counted."""
        return bool(self.max_runs or self.gpu_hours_per_day)

    def require(self, scope: Scope, what: str) -> None:
        """Raises UserError FORBIDDEN when this key may not do `what`, which needs `scope`."""
        if scope not in self.scopes:
            raise UserError(
                "FORBIDDEN",
                f"{what} needs the scope {scope}; the key {self.name} has {', '.join(self.scopes)}",
                hint="Ask the person who runs this server for a key with that scope "
                f"(honesmith key add NAME --scope {scope}).",
            )


LOCAL = Key(STDIO, max_deployments=0)


class Keys:
    """The keys of a home as they are now: the file is read again whenever it was changed."""

    def __init__(self, home: Home, token: str, clock: Callable[[], float] = time.time) -> None:
        self._home = home
        self._owner = Key(
            OWNER,
            digest=digest(token),
            calls_per_minute=OWNER_CALLS_PER_MINUTE,
            max_deployments=0,
        )
        self._clock = clock
        self._seen: tuple[int, ...] = ()
        self._keys: list[Key] = []

    def find(self, token: bytes) -> Key | None:
        """The key that `token` is, None for an unknown or expired one.

        Digests are compared, in constant time; so a token is never compared as text.
        """
        given = hashlib.sha256(token).hexdigest()
        match = None
        for key in (self._owner, *self._stored()):
            if hmac.compare_digest(key.digest, given):
                match = key
        if match is not None and match.expires and match.expires <= self._clock():
            return None
        return match

    def _stored(self) -> list[Key]:
        try:
            stat = os.stat(self._home.keys)
        except OSError:
            self._seen, self._keys = (), []
            return []
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if seen != self._seen:
            try:
                self._keys = list_keys(self._home)
            except UserError:  # a damaged file lets nobody in; `honesmith key list` says why
                self._keys = []
            self._seen = seen
        return self._keys


def digest(token: str) -> str:
    """The SHA-256 that is stored of a token; with 256 random bits no slower hash is needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def list_keys(home: Home) -> list[Key]:
    """The keys of `home`, oldest first. Raises UserError HOME_UNUSABLE when the file is damaged."""
    try:
        return [_key_of(row) for row in read_json(home.keys)["keys"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "HOME_UNUSABLE",
            f"the keys {home.keys} cannot be read: {error}",
            hint="Correct the file, or delete it and add the keys again.",
        ) from error


def _key_of(row: Mapping[str, Any]) -> Key:
    """A key as the file holds it; what a later version added is left out."""
    known = {field.name for field in fields(Key)}
    key = Key(**{name: value for name, value in row.items() if name in known})
    return replace(key, scopes=tuple(scope for scope in SCOPES if scope in row["scopes"]))


def add_key(
    home: Home,
    name: str,
    scopes: Sequence[str],
    *,
    days: float = 0.0,
    calls_per_minute: int = CALLS_PER_MINUTE,
    max_runs: int = 0,
    gpu_hours_per_day: float = 0.0,
    max_deployments: int = DEPLOYMENTS,
) -> tuple[Key, str]:
    """Make a key; returns it and its token, which is kept nowhere.

    Raises UserError BAD_ARGUMENT on a name that is none or taken, or an unknown scope.
    """
    if not NAME.fullmatch(name) or name in (OWNER, STDIO, "local"):
        raise _bad(
            "name", name, "Use up to 40 of a-z, 0-9, dot, - and _; not owner, stdio or local."
        )
    for scope in scopes:
        if scope not in SCOPES:
            raise _bad("scope", scope, f"Choose of {', '.join(SCOPES)}.")
    token = secrets.token_urlsafe(32)
    now = time.time()
    key = Key(
        name=name,
        scopes=tuple(scope for scope in SCOPES if scope in scopes),
        digest=digest(token),
        created=now,
        expires=now + days * 86_400 if days else 0.0,
        calls_per_minute=calls_per_minute,
        max_runs=max_runs,
        gpu_hours_per_day=gpu_hours_per_day,
        max_deployments=max_deployments,
    )
    with locked(home):
        keys = list_keys(home)
        if any(other.name == name for other in keys):
            raise _bad("name", name, f"There is a key of that name: honesmith key remove {name}.")
        _write(home, [*keys, key])
    return key, token


def remove_key(home: Home, name: str) -> None:
    """Delete a key: running servers refuse its next request. Raises UserError BAD_ARGUMENT."""
    with locked(home):
        keys = list_keys(home)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise _bad("name", name, f"Keys of this home: {known}.")
        _write(home, left)


def agreed_by_owner(home: Home, key: Key, asked: "EnvSettings") -> None:
    """Raises UserError FORBIDDEN when an environment that `key` pushes asks for what the owner
    did not agree to: values of this server's variables, or a network to send them over.
    """
    if key.is_owner:
        return
    config = home.user_config()
    secrets = [name for name in asked.secrets if name not in config.key_secrets]
    wants = [f"the secret {name}" for name in secrets]
    lines = []
    if secrets:
        named = ", ".join(f'"{name}"' for name in (*config.key_secrets, *secrets))
        lines.append(f"key_secrets = [{named}]")
    if asked.limits.network and not config.key_network:
        wants.append("a network")
        lines.append("key_network = true")
    if wants:
        raise UserError(
            "FORBIDDEN",
            f"environment.toml asks for {' and '.join(wants)}; the owner of this home has not "
            f"agreed that keys such as {key.name} give that to an environment",
            hint="Leave it out, or ask the owner to push this folder or to set "
            f"{' and '.join(lines)} in the home's config.toml.",
            field="path",
        )


def own_request_id(key: Key, request_id: str) -> str:
    """What `request_id` of `key` is stored as, so that two keys may use the same one.

    The owner's stays as it is. A colon stands in no key's name, so two keys never make one id.
    """
    if key.is_owner or not request_id or len(request_id) > REQUEST_ID:
        return request_id  # the longest are refused in the words for all
    stored = f"{key.name}:{request_id}"
    return stored if len(stored) <= REQUEST_ID else f"{key.name}:{digest(request_id)}"


@contextlib.contextmanager
def locked(home: Home) -> Iterator[None]:
    """A lock on the keys of a home, across processes. Raises UserError HOME_UNUSABLE after 30 s."""
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
async def spending(home: Home, key: Key, turn: "anyio.Lock") -> AsyncIterator[None]:
    """A lock on what a key spends, across processes; waiting for it takes no thread.

    `turn` is a lock within this process: of all calls that wait, one polls the file. Raises
    UserError HOME_UNUSABLE after 30 s.
    """
    # Late: this file is also read by every command, which has no use for it.
    import anyio  # noqa: PLC0415

    with contextlib.ExitStack() as held:
        lock = None
        with anyio.move_on_after(LOCK_S):
            await turn.acquire()
            held.callback(turn.release)
            while (lock := take_lock(home.quota_lock(key.name))) is None:
                await anyio.sleep(POLL_S)
        if lock is None:
            raise UserError(
                "HOME_UNUSABLE",
                f"calls of the key {key.name} that start runs have waited {LOCK_S:g} s for others",
                hint="Call again.",
                retryable=True,
            )
        held.callback(os.close, lock)
        yield


def _write(home: Home, keys: Sequence[Key]) -> None:
    write_json(home.keys, {"keys": [asdict(key) for key in keys]})


def _bad(field: str, value: str, hint: str) -> UserError:
    return UserError(
        "BAD_ARGUMENT", f"{field}={value[:60]!r} cannot be used", hint=hint, field=field
    )
