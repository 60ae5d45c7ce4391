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

_MOST_BYTES = 1 << 20  # of a pickle
_MOST_OPERATIONS = 200_000  # in a pickle
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
    """Read the address out of a handle, as the API gives it: the base64 of a pickle. Returns None
    for anything else, and for a handle without a usable address."""
    if not isinstance(handle, str) or len(handle) > 2 * _MOST_BYTES:
        return None
    try:
        state = plain(base64.b64decode(handle, validate=True))
    except (Damaged, binascii.Error):
        return None
    if not isinstance(state, dict):
        return None
    pairs, ports = state.get("stable_internal_external_ips"), state.get("stable_ssh_ports")
    first_pair = pairs[0] if isinstance(pairs, list) and pairs else None
    ip = None
    if isinstance(first_pair, tuple) and len(first_pair) == 2:
        internal_ip, external_ip = first_pair
        # A pod, or a machine of a private network, has no external address.
        ip = external_ip or internal_ip
    port = ports[0] if isinstance(ports, list) and ports else _DEFAULT_PORT
    if not isinstance(ip, str) or not isinstance(port, int) or not 0 < port < 65536:
        return None
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return None
    user = state.get("docker_user")
    if not isinstance(user, str) or _USER.fullmatch(user) is None:
        user = ""
    return Address(ip, port, user)


# On the stack: pickle's MARK, below which lie the items of a container. In `_VALUES`: the value is
# the operation's own argument.
_MARK = object()


class _Reader:
    """Carries out the operations of a pickle, which work on a stack of values, without its calls of
    Python code.

    Attributes:
        stack: the values, the newest last.
        memo: values that the pickle has stored to use them again, by number.
    """

    def __init__(self) -> None:
        """Begin with an empty stack."""
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Return the value that the pickle `data` describes. Raises Damaged for an operation that
        is not known here or a pickle without an end, and errors such as IndexError for one that
        takes values that are not there."""
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count > _MOST_OPERATIONS:
                raise Damaged("a pickle of too many operations")
            if operation.name == "STOP":
                value = self.stack.pop()
                if value is _MARK:
                    raise Damaged("a pickle that leaves nothing")
                return value
            method = _OPERATIONS.get(operation.name)
            if method is not None:
                method(self, argument)
            elif operation.name in _VALUES:
                value = _VALUES[operation.name]
                self.stack.append(argument if value is _MARK else value)
            elif operation.name not in ("PROTO", "FRAME"):
                raise Damaged(f"a pickle with {operation.name}")
        raise Damaged("a pickle without an end")

    def to_mark(self) -> list[Any]:
        """Take the values down to the last mark off the stack, with the mark, and return them in
        their order. Raises IndexError if there is no mark."""
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def fill(self, items: list[Any]) -> None:
        """Add `items`, which are keys and values in turn, to the dict on top of the stack. If
        something else is on top, they are dropped."""
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        """Add the items to the list on top of the stack (a set is read as a list). If something
        else is on top, they are dropped."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)

    def build(self) -> None:
        """Take a state off the stack and put it into the object below: here an object is a dict of
        its attributes."""
        state = self.stack.pop()
        # An object with slots has a pair: the dict of its attributes, and the slots.
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
            state = state[0]
        if isinstance(self.stack[-1], _Object) and isinstance(state, dict):
            self.stack[-1].update(state)

    def make(self, count: int) -> None:
        """Replace the `count` values on top of the stack, a class and its arguments, by an empty
        object. Nothing is called."""
        for _ in range(count):
            self.stack.pop()
        self.stack.append(_Object())

    def tuple_of(self, count: int) -> None:
        """Replace the `count` values on top of the stack by a tuple of them. Raises Damaged if
        there are fewer."""
        items = self.stack[-count:]
        if len(items) < count or _MARK in items:
            raise Damaged("a pickle with a tuple of too few")
        self.stack[-count:] = [tuple(items)]

    def get(self, index: int) -> None:
        """Push the value that was stored in the memo under `index`."""
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        """Store the value on top of the stack in the memo under `index`."""
        self.memo[index] = self.stack[-1]


class _Object(dict[Any, Any]):
    """An object of whatever class: its state, and nothing that it could do."""


def plain(data: bytes) -> Any:
    """Return the value in a pickle without running any of its code: objects of any class become
    dicts of their attributes. Raises Damaged if it cannot be read."""
    if len(data) > _MOST_BYTES:
        raise Damaged("a pickle that is too large")
    try:
        return _Reader().run(data)
    except Damaged:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(str(error)) from error


# The operations that push a value: the value itself, or _MARK for the operation's argument.
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
# The operations that work on the stack: called with (the reader, the operation's argument).
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
