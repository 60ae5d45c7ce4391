"""The address of a cluster's machine, read from the pickle that SkyPilot answers with.

SkyPilot's API gives what it calls a handle as a pickled object of its own classes. Unpickling runs
what a pickle says, so none is unpickled here: its operations are read one by one, and only plain
values are built. An object becomes its state, a call becomes nothing.
"""

import base64
import binascii
import ipaddress
import pickletools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_BYTES = 1 << 20
_MOST_OPERATIONS = 200_000
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_DEFAULT_PORT = 22


@dataclass(frozen=True)
class Address:
    """Where the machine of a cluster answers to ssh; `user` is "" where the handle does not say."""

    ip: str
    port: int
    user: str = ""


class Damaged(ValueError):
    """No pickle that SkyPilot writes."""


def address_of(handle: object) -> Address | None:
    """The address in a handle as the API gives it (base64); None where it has none that can be
    used."""
    if not isinstance(handle, str) or len(handle) > 2 * _MOST_BYTES:
        return None
    try:
        state = plain(base64.b64decode(handle, validate=True))
    except (Damaged, binascii.Error):
        return None
    if not isinstance(state, dict):
        return None
    pairs, ports = state.get("stable_internal_external_ips"), state.get("stable_ssh_ports")
    first = pairs[0] if isinstance(pairs, list) and pairs else None
    # Inside, outside: a pod, or a machine of a private network, has the first alone.
    ip = (first[1] or first[0]) if isinstance(first, tuple) and len(first) == 2 else None
    port = ports[0] if isinstance(ports, list) and ports else _DEFAULT_PORT
    if not isinstance(ip, str) or not isinstance(port, int) or not 0 < port < 65536:
        return None
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return None
    user = state.get("docker_user")
    return Address(ip, port, user if isinstance(user, str) and _USER.fullmatch(user) else "")


_MARK = object()


class _Reader:
    """The stack machine of a pickle, without its calls."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The value that the pickle leaves."""
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count > _MOST_OPERATIONS:
                raise Damaged("a pickle of too many operations")
            if operation.name == "STOP":
                value = self.stack.pop()
                if value is _MARK:
                    raise Damaged("a pickle that leaves nothing")
                return value
            act = _OPERATIONS.get(operation.name)
            if act is not None:
                act(self, argument)
            elif operation.name in _VALUES:
                value = _VALUES[operation.name]
                self.stack.append(argument if value is _MARK else value)
            elif operation.name not in ("PROTO", "FRAME"):
                raise Damaged(f"a pickle with {operation.name}")
        raise Damaged("a pickle without an end")

    def to_mark(self) -> list[Any]:
        """Take everything down to the last mark."""
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def fill(self, items: list[Any]) -> None:
        """Put keys and values into the dict on top; an object keeps nothing."""
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        """Put items into the list or set on top; an object keeps nothing."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)

    def build(self) -> None:
        """Give the object on top its state: the object is its state."""
        state = self.stack.pop()
        # An object with slots gives a pair.
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
            state = state[0]
        if isinstance(self.stack[-1], _Object) and isinstance(state, dict):
            self.stack[-1].update(state)

    def make(self, taken: int) -> None:
        """An object, in place of the class and the arguments that would make it."""
        for _ in range(taken):
            self.stack.pop()
        self.stack.append(_Object())

    def tuple_of(self, count: int) -> None:
        """A tuple of the last items."""
        items = self.stack[-count:]
        if len(items) < count or _MARK in items:
            raise Damaged("a pickle with a tuple of too few")
        self.stack[-count:] = [tuple(items)]

    def get(self, index: int) -> None:
        """A value of the memo."""
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        """Keep the value on top in the memo."""
        self.memo[index] = self.stack[-1]


class _Object(dict[Any, Any]):
    """An object of whatever class: its state, and nothing that it could do."""


def plain(data: bytes) -> Any:
    """The value in a pickle, its objects as dicts of their states. Raises Damaged."""
    if len(data) > _MOST_BYTES:
        raise Damaged("a pickle that is too large")
    try:
        return _Reader().run(data)
    except Damaged:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(str(error)) from error


_VALUES: Mapping[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE"),
            *("BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        ),
        _MARK,
    ),
}
_OPERATIONS: Mapping[str, Callable[[_Reader, Any], object]] = {
    "EMPTY_DICT": lambda on, _: on.stack.append({}),
    "EMPTY_LIST": lambda on, _: on.stack.append([]),
    "EMPTY_TUPLE": lambda on, _: on.stack.append(()),
    "EMPTY_SET": lambda on, _: on.stack.append([]),
    "MARK": lambda on, _: on.stack.append(_MARK),
    "TUPLE": lambda on, _: on.stack.append(tuple(on.to_mark())),
    "FROZENSET": lambda on, _: on.stack.append(tuple(on.to_mark())),
    "TUPLE1": lambda on, _: on.tuple_of(1),
    "TUPLE2": lambda on, _: on.tuple_of(2),
    "TUPLE3": lambda on, _: on.tuple_of(3),
    "SETITEM": lambda on, _: on.fill([on.stack.pop(-2), on.stack.pop()]),
    "SETITEMS": lambda on, _: on.fill(on.to_mark()),
    "APPEND": lambda on, _: on.extend([on.stack.pop()]),
    "APPENDS": lambda on, _: on.extend(on.to_mark()),
    "ADDITEMS": lambda on, _: on.extend(on.to_mark()),
    "STACK_GLOBAL": lambda on, _: on.make(2),
    "GLOBAL": lambda on, _: on.make(0),
    "REDUCE": lambda on, _: on.make(2),
    "NEWOBJ": lambda on, _: on.make(2),
    "NEWOBJ_EX": lambda on, _: on.make(3),
    "BUILD": lambda on, _: on.build(),
    "POP": lambda on, _: on.stack.pop(),
    "MEMOIZE": lambda on, _: on.put(len(on.memo)),
    "BINPUT": lambda on, index: on.put(index),
    "LONG_BINPUT": lambda on, index: on.put(index),
    "BINGET": lambda on, index: on.get(index),
    "LONG_BINGET": lambda on, index: on.get(index),
}
