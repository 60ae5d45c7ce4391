"""Calls as tags: which type a text without quotes has."""

from typing import Any

import pytest

from engine.models.dialects.reading import ParsedCall
from engine.models.dialects.tagged_calls import glm, qwen_tags


def tool(**properties: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def read(value: str, schema: dict[str, Any] | None) -> object:
    text = f"<tool_call><function=f>\n<parameter=a>\n{value}\n</parameter>\n</function></tool_call>"
    (call,) = qwen_tags(text, tool(a=schema) if schema is not None else []).calls
    return call.arguments["a"]


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("75001", {"type": "string"}, "75001"),
        ("75001", {"type": "integer"}, 75001),
        ("75001", None, 75001),
        ("3.0", {"type": "number"}, 3.0),
        ("3", {"type": ["string", "number"]}, 3),
        ("3", {"type": ["string", "null"]}, "3"),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("True", {"type": "boolean"}, True),
        ("false", {}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ('"x"', None, '"x"'),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("NaN", {"type": "number"}, "NaN"),
        ('{"b": [1]}', {"type": "object"}, {"b": [1]}),
        ("  two\n\nlines ", {"type": "string"}, "  two\n\nlines "),
        ("", {"type": "string"}, ""),
    ],
)
def test_the_schema_says_which_type_a_text_has(
    value: str, schema: dict[str, Any] | None, expected: object
) -> None:
    got = read(value, schema)
    assert got == expected and type(got) is type(expected)


def test_a_value_may_hold_the_tags_of_others() -> None:
    assert read("</parameter> <tool_call>", {"type": "string"}) == "</parameter> <tool_call>"


@pytest.mark.parametrize(
    ("reader", "text", "why"),
    [
        (qwen_tags, "<tool_call>\n{}\n</tool_call>", "no name of a tool"),
        (qwen_tags, "<tool_call><function=f><parameter=a>1", "</function> should follow"),
        (qwen_tags, "<tool_call><function=f></function>", "</tool_call> should follow"),
        (glm, "<tool_call></tool_call>", "no name of a tool"),
        (glm, "<tool_call>f<arg_key>a</arg_key></tool_call>", "</tool_call> should follow"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(reader: Any, text: str, why: str) -> None:
    found = reader(text, [])
    assert found.calls == () and why in found.faults[0]


def test_a_call_without_arguments_is_read() -> None:
    assert glm("<tool_call>f</tool_call>", []).calls == (ParsedCall("f", {}),)
