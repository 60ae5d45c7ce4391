"""Tool calls are right when they are the expected ones, no more and no fewer."""

import pytest

from envs import ToolCall
from envs.scorers import tool_calls

ADD = {"name": "add", "arguments": {"a": 1, "b": {"c": [2, 3]}}}
GET = {"name": "get", "arguments": {"id": "7"}}


@pytest.mark.parametrize(
    "calls",
    [
        [ADD, GET],
        [GET, ToolCall("add", {"b": {"c": [2.0, 3]}, "a": 1})],
        [
            {"function": {"name": "get", "arguments": '{"id": "7"}'}},
            {"name": "add", "arguments": {"a": 1, "b": {"c": [2, 3]}}},
        ],
    ],
)
def test_the_expected_calls_in_any_order_are_paid(calls: list):
    assert tool_calls(calls, [ADD, GET]) == 1.0


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [ADD],
        [ADD, ADD],
        [ADD, GET, GET],
        [ADD, {"name": "get", "arguments": {"id": 7}}],
        [ADD, {"name": "get", "arguments": {"id": "7", "force": True}}],
        [ADD, {"name": "get", "arguments": "{broken"}],
        [{"name": "add", "arguments": {"a": True, "b": {"c": [2, 3]}}}, GET],
        [ADD, "get"],
    ],
)
def test_other_calls_are_not_paid(calls: list):
    assert tool_calls(calls, [ADD, GET]) == 0.0


def test_order_and_optional_arguments_are_as_asked():
    assert tool_calls([GET, ADD], [ADD, GET], in_order=True) == 0.0
    assert tool_calls([ADD, GET], [ADD, GET], in_order=True) == 1.0
    noted = {"name": "get", "arguments": {"id": "7", "note": "x"}}
    assert tool_calls([noted], [GET], optional=["note"]) == 1.0
