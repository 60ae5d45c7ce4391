"""Which calls are invalid though they can be read."""

from typing import Any

import pytest

from engine.models.dialects.arguments import fault_of
from engine.models.dialects.reading import ParsedCall


def tool(name: str, parameters: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "look",
        {
            "type": "object",
            "properties": {
                "at": {"type": "string", "pattern": "(a+)+$"},
                "pattern": {"type": "integer"},
            },
            "required": ["at"],
            "additionalProperties": False,
        },
    ),
    tool("odd", {"$ref": "#/elsewhere"}),
    tool("broken", {"properties": 5}),
    {"type": "function", "function": {"name": "free"}},
]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (ParsedCall("lock", {"at": "a"}), "there is no tool 'lock'; there are: look, odd, broken"),
        (ParsedCall("look", {}), "look: at is missing"),
        (ParsedCall("look", {"at": 1}), "look.at: not of type string"),
        (ParsedCall("look", {"at": "a", "pattern": "x"}), "look.pattern: not of type integer"),
        (ParsedCall("look", {"at": "a", "on": 1}), "look.on: not allowed"),
    ],
)
def test_an_invalid_call_says_why(call: ParsedCall, why: str) -> None:
    assert why in (fault_of(call, TOOLS) or "")


@pytest.mark.parametrize(
    "call",
    [
        ParsedCall("look", {"at": "a" * 40 + "b"}),  # its pattern would take for ever
        ParsedCall("odd", {"anything": 1}),
        ParsedCall("broken", {"anything": 1}),
        ParsedCall("free", {"anything": 1}),
    ],
)
def test_a_schema_that_cannot_be_checked_faults_nothing(call: ParsedCall) -> None:
    assert fault_of(call, TOOLS) is None
