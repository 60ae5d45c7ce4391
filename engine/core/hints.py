"""The next move, as data: a sentence, and the call of a tool that makes it.

Errors carry a `Hint`, results a list of `Call` under `next`. Each front end renders them its way:
tools as a call with keyword arguments, the command line as a shell command.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        tool: its name.
        arguments: by name, as JSON values.
    """

    tool: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        """As an agent types it: `push_env(path="x", install=true)`."""
        shown = (
            f"{name}={json.dumps(value, ensure_ascii=False)}"
            for name, value in self.arguments.items()
        )
        return f"{self.tool}({', '.join(shown)})"

    def to_json(self) -> dict[str, object]:
        return {"tool": self.tool, "arguments": dict(self.arguments)}

    @staticmethod
    def from_json(value: object) -> "Call | None":
        """The call behind a JSON object; None for anything that is none."""
        if not isinstance(value, Mapping):
            return None
        body = cast(Mapping[str, object], value)
        tool, arguments = body.get("tool"), body.get("arguments", {})
        if not isinstance(tool, str) or not tool or not isinstance(arguments, Mapping):
            return None
        return Call(tool, cast(Mapping[str, object], arguments))


@dataclass(frozen=True)
class Change:
    """What to change in a call that was refused, where only the caller knows the whole call.

    Attributes:
        arguments: those to give, with their new values.
        settings: those to give inside the argument `settings`.
        without: settings to leave out.
        without_arguments: arguments to leave out.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    without_arguments: tuple[str, ...] = ()

    def applied(self, refused: Call) -> Call:
        """`refused`, changed."""
        arguments = {
            name: value
            for name, value in refused.arguments.items()
            if name not in self.without_arguments
        }
        arguments = {**arguments, **self.arguments}
        if self.settings or self.without:
            given = arguments.get("settings")
            settings = dict(cast(Mapping[str, object], given)) if isinstance(given, Mapping) else {}
            settings = {name: v for name, v in settings.items() if name not in self.without}
            arguments["settings"] = {**settings, **self.settings}
        return Call(refused.tool, arguments)


@dataclass(frozen=True)
class Hint:
    """What to do next.

    Attributes:
        text: a sentence that is right for agents and for people at a terminal alike.
        call: the call that does it, where it is known.
        change: what to change in the refused call, where the call itself is not known here.
    """

    text: str = ""
    call: Call | None = None
    change: Change | None = None

    def __str__(self) -> str:
        """For an agent: the sentence, then the call."""
        return f"{self.text} {self.call}".strip() if self.call else self.text

    def __bool__(self) -> bool:
        return bool(self.text or self.call)

    def of(self, refused: Call) -> "Hint":
        """The hint of a call that was refused: what to change in it becomes the whole call."""
        if self.change is None or self.call is not None:
            return self
        return Hint(self.text, self.change.applied(refused))

    def after(self, text: str) -> "Hint":
        """The same move with `text` before it."""
        return Hint(f"{text} {self.text}".strip(), self.call, self.change)

    def to_json(self) -> str | dict[str, object]:
        """As it is stored: an object where there is a call, else the sentence alone."""
        return {"text": self.text, "call": self.call.to_json()} if self.call else self.text

    @staticmethod
    def from_json(value: object) -> "Hint":
        """What `to_json` gave; before there were calls, hints were stored as text alone."""
        if isinstance(value, Mapping):
            body = cast(Mapping[str, object], value)
            return Hint(str(body.get("text") or ""), Call.from_json(body.get("call")))
        return Hint(str(value or ""))

    def dump(self) -> str:
        """As a text column of the database holds it."""
        stored = self.to_json()
        return stored if isinstance(stored, str) else json.dumps(stored, ensure_ascii=False)

    @staticmethod
    def load(stored: str) -> "Hint":
        """What `dump` gave."""
        if stored.startswith('{"text": '):
            try:
                return Hint.from_json(json.loads(stored))
            except ValueError:
                return Hint(stored)
        return Hint(stored)

    def shown(self, name: str = "hint") -> dict[str, object]:
        """As the fields of a result: the text for an agent under `name`, the call as data."""
        fields: dict[str, object] = {name: str(self)}
        return fields | ({"call": self.call.to_json()} if self.call else {})

    @staticmethod
    def read(text: str, call: object) -> "Hint":
        """The hint behind such fields of a result."""
        made = Call.from_json(call)
        return Hint(text.removesuffix(str(made)).rstrip() if made else text, made)


def hint_of(hint: "str | Hint") -> Hint:
    return hint if isinstance(hint, Hint) else Hint(hint)
