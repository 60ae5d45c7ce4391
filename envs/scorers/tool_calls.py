"""Compare the tool calls of a model with the calls that were expected."""

from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import ToolCall
from envs.json_types import JsonObject

Call = ToolCall | Mapping[str, Any]


def tool_calls(
    calls: Sequence[Call],
    expected: Sequence[Call],
    *,
    in_order: bool = False,
    optional: Sequence[str] = (),
) -> float:
    """Return 1 if the calls are the expected ones, each exactly once, with no others; else 0.

    Arguments are compared as JSON: 5 equals 5.0 but not "5", and the order of keys does not matter.
    A call whose arguments could not be parsed never matches.

    Args:
        calls: the model's calls, such as `completion.tool_calls` of a `Message`; dicts in OpenAI's
            shape or in the short form {"name", "arguments"} are accepted too.
        expected: the right calls, in the same forms.
        in_order: whether the calls must come in the order of `expected`.
        optional: names of arguments that are not compared.

    Raises ValueError if an item of `expected` is not a tool call.
    """
    expected_calls = [_name_and_arguments(_as_call(call), optional) for call in expected]
    parsed_calls: list[tuple[str, JsonObject]] = []
    for call in calls:
        try:
            parsed = _as_call(call)
        except ValueError:
            return 0.0
        if parsed.invalid:
            return 0.0
        parsed_calls.append(_name_and_arguments(parsed, optional))
    if len(parsed_calls) != len(expected_calls):
        return 0.0
    if in_order:
        pairs = zip(parsed_calls, expected_calls, strict=True)
        return float(all(_is_same_json(call, expected_call) for call, expected_call in pairs))
    return float(_are_same_calls(parsed_calls, expected_calls))


def _are_same_calls(
    calls: Sequence[tuple[str, JsonObject]], expected_calls: Sequence[tuple[str, JsonObject]]
) -> bool:
    """Whether two lists of equal length hold the same calls, in any order.

    Each call is (name, arguments). Each expected call is matched by one call only.
    """
    unmatched = list(expected_calls)
    for call in calls:
        for index, expected_call in enumerate(unmatched):
            if _is_same_json(call, expected_call):
                unmatched.pop(index)
                break
        else:
            return False
    return True


def _as_call(call: Call) -> ToolCall:
    """Return a call as `ToolCall`. Raises ValueError if it is not a tool call."""
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping):
        raise ValueError(f"a tool call is a dict, got {call!r:.80}")
    return ToolCall.from_dict(call)


def _name_and_arguments(call: ToolCall, optional: Sequence[str]) -> tuple[str, JsonObject]:
    """Return (name, arguments) of a call, without the `optional` arguments, which are not
    compared."""
    compared = {name: value for name, value in call.arguments.items() if name not in optional}
    return call.name, compared


def _is_same_json(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal. Unlike in Python, true does not equal 1, and a tuple
    equals the list of the same items."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return False
        return all(_is_same_json(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_same_json, left, right))
    return bool(left == right)
