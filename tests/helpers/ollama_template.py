"""Renders the templates of our Modelfiles as Ollama does: the small part of Go's text/template that
they use.

Source: Template.Execute and collate in Ollama's template/template.go: messages of one role in a row
are joined by an empty line, those of the system are `.System`, and stay in `.Messages` too.
"""

import re
from collections.abc import Mapping, Sequence

Message = Mapping[str, str]
_ACTION = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)


def template_of(modelfile: str) -> str:
    """The text between the quotes of TEMPLATE."""
    return modelfile.partition('TEMPLATE """')[2].partition('"""')[0]


def render(template: str, messages: Sequence[Message]) -> str:
    collated: list[dict[str, str]] = []
    for message in messages:
        if collated and collated[-1]["role"] == message["role"]:
            collated[-1]["content"] += "\n\n" + message["content"]
        else:
            collated.append(dict(message))
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system")
    parts = _ACTION.split(template)
    text, read = _block(parts, 0, {"System": system, "Messages": collated})
    assert read == len(parts), "a block ends that did not begin"
    return text


def _block(parts: list[str], at: int, scope: dict) -> tuple[str, int]:
    """The text of `parts` from index `at` (texts at even places, actions at odd ones) up to the end
    or the `else` of this block; and the index of that action."""
    written = ""
    while at < len(parts):
        if at % 2 == 0:
            written += parts[at]
            at += 1
            continue
        action = parts[at]
        if action == "end" or action.startswith("else"):
            return written, at
        if action.startswith("if "):
            shown, at = _branches(parts, at, action.removeprefix("if "), scope)
            written += shown
        elif action == "range $i, $_ := .Messages":
            end = at
            for number, message in enumerate(scope["Messages"], start=1):
                is_last = number == len(scope["Messages"])
                inner = {"Role": message["role"], "Content": message["content"], "last": is_last}
                shown, end = _block(parts, at + 1, inner)
                written += shown
            assert parts[end] == "end"
            at = end + 1
        else:
            assert action.startswith("."), action
            written += scope[action[1:]]
            at += 1
    return written, at


def _branches(parts: list[str], at: int, condition: str, scope: dict) -> tuple[str, int]:
    """The text of the first branch that holds; and the index after the `end` of the whole."""
    shown, taken = "", False
    while True:
        holds = not taken and _holds(condition, scope)
        text, at = _block(parts, at + 1, scope)
        shown, taken = (text, True) if holds else (shown, taken)
        if parts[at] == "end":
            return shown, at + 1
        condition = parts[at].removeprefix("else").strip().removeprefix("if ") or "true"


def _holds(condition: str, scope: dict) -> bool:
    if condition == "true":
        return True
    if condition == "eq (len (slice $.Messages $i)) 1":
        return scope["last"]
    equal = re.fullmatch(r'eq \.(\w+) "(\w+)"', condition)
    return scope[equal[1]] == equal[2] if equal else bool(scope[condition.removeprefix(".")])
