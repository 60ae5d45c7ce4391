"""Which calls are invalid though they can be read."""

from typing import Any

import pytest

from engine.models.dialects.arguments import fault_of
from engine.models.dialects.reading import FoundCall


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
        (FoundCall("lock", {"at": "a"}), "there is no tool 'lock'; there are: look, odd, broken"),
        (FoundCall("look", {}), "look: at is missing"),
        (FoundCall("look", {"at": 1}), "look.at: not of type string"),
        (FoundCall("look", {"at": "a", "pattern": "x"}), "look.pattern: not of type integer"),
        (FoundCall("look", {"at": "a", "on": 1}), "look.on: not allowed"),
    ],
)
def test_an_invalid_call_says_why(call: FoundCall, why: str) -> None:
    assert why in (fault_of(call, TOOLS) or "")


@pytest.mark.parametrize(
    "call",
    [
        FoundCall("look", {"at": "a" * 40 + "b"}),  # its pattern would take for ever
        FoundCall("odd", {"anything": 1}),
        FoundCall("broken", {"anything": 1}),
        FoundCall("free", {"anything": 1}),
    ],
)
def test_a_schema_that_cannot_be_checked_faults_nothing(call: FoundCall) -> None:
    assert fault_of(call, TOOLS) is None
