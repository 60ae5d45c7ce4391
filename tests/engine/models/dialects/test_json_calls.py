"""Formats that no template of trl writes, after their publications, and calls that are none."""

import pytest

from engine.models.dialects.json_calls import deepseek, hermes, llama, mistral, phi
from engine.models.dialects.reading import ParsedCall, ParsedCalls, Reader

ADD = ParsedCall("add", {"a": 1})
SAY = ParsedCall("say", {"text": "</tool_call> [x]"})
ADD_JSON, SAY_JSON = (
    '{"name": "add", "arguments": {"a": 1}}',
    ('{"name": "say", "arguments": {"text": "</tool_call> [x]"}}'),
)
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("reader", "text", "found"),
    [
        (hermes, "No call.", ParsedCalls("No call.")),
        (hermes, f"So:<tool_call>\n{ADD_JSON}\n</tool_call>", ParsedCalls("So:", (ADD,))),
        (
            hermes,
            f"<tool_call>{SAY_JSON}</tool_call> and <tool_call>{ADD_JSON}</tool_call>",
            ParsedCalls("and", (SAY, ADD)),
        ),
        (
            hermes,
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            ParsedCalls("", (ADD,)),
        ),
        (
            hermes,
            '<tool_call>{"name": "add"}</tool_call>',
            ParsedCalls("", (ParsedCall("add", {}),)),
        ),
        (mistral, f"[TOOL_CALLS] [{ADD_JSON}, {SAY_JSON}]", ParsedCalls("", (ADD, SAY))),
        (
            mistral,
            'Hm.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
            ParsedCalls("Hm.", (ParsedCall("add", {"a": 1}, "abcdefghi"),)),
        ),
        (
            mistral,
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}',
            ParsedCalls("", (ADD, ParsedCall("add", {"a": 1}, "abcdefghi"))),
        ),
        (mistral, '[TOOL_CALLS]add{"a": 1}', ParsedCalls("", (ADD,))),
        (phi, f"<|tool_call|>{ADD_JSON}<|/tool_call|>", ParsedCalls("", (ADD,))),
        (phi, f"<|tool_call|>[{ADD_JSON}, {SAY_JSON}]", ParsedCalls("", (ADD, SAY))),
        (llama, '{"name": "add", "parameters": {"a": 1}}', ParsedCalls("", (ADD,))),
        (
            llama,
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; '
            '{"name": "add", "parameters": {"a": 1}}',
            ParsedCalls("", (ADD, ADD)),
        ),
        (
            llama,
            '<|python_tag|>search.call(query="a b")',
            ParsedCalls("", (ParsedCall("search", {"query": "a b"}),)),
        ),
        (llama, '{"name": "Ada"}', ParsedCalls('{"name": "Ada"}')),
        (llama, '{"answer": 3', ParsedCalls('{"answer": 3')),
        (deepseek, f'{BEGIN}add{SEP}{{"a": 1}}{END}', ParsedCalls("", (ADD,))),
        (
            deepseek,
            f'So.<｜tool▁calls▁begin｜>{BEGIN}function{SEP}add\n```json\n{{"a": 1}}\n```{END}'
            "<｜tool▁calls▁end｜>",
            ParsedCalls("So.", (ADD,)),
        ),
    ],
)
def test_calls_are_read_as_they_were_published(
    reader: Reader, text: str, found: ParsedCalls
) -> None:
    assert reader(text, ()) == found


@pytest.mark.parametrize(
    ("reader", "text", "why"),
    [
        (hermes, "<tool_call>{no json</tool_call>", "not JSON"),
        (hermes, "<tool_call>[1, 2]</tool_call>", "an object with a name"),
        (hermes, '<tool_call>{"name": 5}</tool_call>', "an object with a name"),
        (hermes, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are no object"),
        (hermes, f"<tool_call>{ADD_JSON} and", "</tool_call> should follow"),
        (hermes, '<tool_call>{"name": "ad', "not JSON"),
        (hermes, "<tool_call>" + "[" * 100_000, "not JSON"),
        (hermes, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "not JSON"),
        (hermes, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "not JSON"),
        (mistral, "[TOOL_CALLS] []", "no calls"),
        (mistral, "[TOOL_CALLS](", "a list of calls or a name"),
        (mistral, "[TOOL_CALLS]add[ARGS]{", "not JSON"),
        (phi, "<|tool_call|>", "not JSON"),
        (llama, '{"name": "add", "parameters": {"a": 1', "not JSON"),
        (llama, '{"name": "add", "parameters": {"a": 1}} Done.', "not JSON"),
        (llama, "<|python_tag|>import os", "no call of a tool"),
        (deepseek, f"{BEGIN}add{END}", "no <｜tool▁sep｜>"),
        (deepseek, f"{BEGIN}function{SEP}add {{}}{END}", "no name with arguments"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(reader: Reader, text: str, why: str) -> None:
    found = reader(text, ())
    assert found.calls == () and len(found.faults) == 1
    assert why in found.faults[0] and len(found.faults[0]) < 200
