"""What a caller should do next, as data: a sentence, and the call of a tool that does it.

Errors have a `Hint`, results a list of `Call` under `next`. Each front end writes them in its own
way: tools as a call with keyword arguments, the command line as a shell command.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        tool: the name of the tool.
        arguments: argument -> JSON value.
        needs: names of further arguments that only the caller can give; if it is empty, the call
            can be made as it is.
    """

    tool: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Write the call as text, with its values as JSON: `push_env(path="x", install=true)`."""
        arguments = (
            f"{name}={json.dumps(value, ensure_ascii=False)}"
            for name, value in self.arguments.items()
        )
        return f"{self.tool}({', '.join(arguments)})"

    def to_json(self) -> dict[str, object]:
        """Return the call as a JSON object: {"tool", "arguments"}, and "needs" unless it is
        empty."""
        needs = {"needs": list(self.needs)} if self.needs else {}
        return {"tool": self.tool, "arguments": dict(self.arguments), **needs}

    @staticmethod
    def from_json(value: object) -> "Call | None":
        """Read the call from what `to_json` returned; None if `value` has another form.

        `needs` is not read.
        """
        if not isinstance(value, Mapping):
            return None
        fields = cast(Mapping[str, object], value)
        tool, arguments = fields.get("tool"), fields.get("arguments", {})
        if not isinstance(tool, str) or not tool or not isinstance(arguments, Mapping):
            return None
        return Call(tool, cast(Mapping[str, object], arguments))


@dataclass(frozen=True)
class Change:
    """What to change in a call that was refused.

    It is used where the code that refuses the call knows only a part of its arguments.

    Attributes:
        arguments: arguments to set: name -> new value.
        settings: settings to set inside the argument `settings`: name -> new value.
        without: names of settings to leave out.
        without_arguments: names of arguments to leave out.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    without_arguments: tuple[str, ...] = ()

    def applied_to(self, refused: Call) -> Call:
        """Return the call to make instead of `refused`: the same call with this change made to its
        arguments and settings."""
        arguments = {
            name: value
            for name, value in refused.arguments.items()
            if name not in self.without_arguments
        }
        arguments |= self.arguments
        if self.settings or self.without:
            old_settings = arguments.get("settings")
            if not isinstance(old_settings, Mapping):  # none were given, or the value is invalid
                old_settings = {}
            kept_settings = {
                name: value
                for name, value in cast(Mapping[str, object], old_settings).items()
                if name not in self.without
            }
            arguments["settings"] = {**kept_settings, **self.settings}
        return Call(refused.tool, arguments)


@dataclass(frozen=True)
class Hint:
    """What to do next.

    Attributes:
        text: a sentence that suits agents and people at a terminal.
        call: the call that does what the sentence says; None if it is not known.
        change: what to change in the refused call; None if nothing, or if `call` is known.
    """

    text: str = ""
    call: Call | None = None
    change: Change | None = None

    def __str__(self) -> str:
        """Write the hint as one text for an agent: the sentence, then the call."""
        if self.call is None:
            return self.text
        return f"{self.text} {self.call}".strip()

    def __bool__(self) -> bool:
        """Return whether the hint has a sentence or a call. A change alone cannot be shown."""
        return bool(self.text or self.call)

    def for_call(self, refused: Call) -> "Hint":
        """Return the hint to show for the call `refused`.

        A hint that only says what to change becomes a hint with the whole changed call. Any other
        hint is returned unchanged.
        """
        if self.change is None or self.call is not None:
            return self
        return Hint(self.text, self.change.applied_to(refused))

    def after(self, text: str) -> "Hint":
        """Return the same hint with `text` before its sentence."""
        return Hint(f"{text} {self.text}".strip(), self.call, self.change)

    def to_json(self) -> str | dict[str, object]:
        """Return the hint as JSON: {"text", "call"} if it has a call, else only the sentence.

        A change is not included.
        """
        return {"text": self.text, "call": self.call.to_json()} if self.call else self.text

    @staticmethod
    def from_json(value: object) -> "Hint":
        """Read the hint from what `to_json` returned.

        A value that is not an object becomes the sentence, because older releases stored hints as
        plain text. None becomes an empty hint.
        """
        if isinstance(value, Mapping):
            body = cast(Mapping[str, object], value)
            return Hint(str(body.get("text") or ""), Call.from_json(body.get("call")))
        return Hint(str(value or ""))

    def dump(self) -> str:
        """Write the hint as text for a column of the database: the sentence, or JSON if the hint
        has a call."""
        stored = self.to_json()
        return stored if isinstance(stored, str) else json.dumps(stored, ensure_ascii=False)

    @staticmethod
    def load(stored: str) -> "Hint":
        """Read the hint from the text that `dump` wrote."""
        if stored.startswith('{"text": '):  # the JSON of a hint with a call begins like this
            try:
                return Hint.from_json(json.loads(stored))
            except ValueError:  # a sentence that begins like JSON
                return Hint(stored)
        return Hint(stored)

    def as_fields(self, name: str = "hint") -> dict[str, object]:
        """Return the hint as fields of a result.

        The key `name` has the sentence and the call as one text. The key "call" has the call as a
        JSON object; it is left out if the hint has no call.
        """
        fields: dict[str, object] = {name: str(self)}
        if self.call:
            fields["call"] = self.call.to_json()
        return fields

    @staticmethod
    def from_fields(text: str, call: object) -> "Hint":
        """Read the hint from the two fields that `as_fields` returned.

        `text` is the sentence and the call as one text, `call` the call as a JSON object, None if
        there is no call.
        """
        parsed_call = Call.from_json(call)
        # The text ends with the call (see `__str__`); the sentence is the part before it.
        sentence = text.removesuffix(str(parsed_call)).rstrip() if parsed_call else text
        return Hint(sentence, parsed_call)


def hint_of(hint: "str | Hint") -> Hint:
    """Convert a text to a Hint with this sentence; return a Hint unchanged."""
    return hint if isinstance(hint, Hint) else Hint(hint)
