"""Calls as Python, read and never run."""

import pytest

from engine.models.dialects.python_calls import lfm, pythonic
from engine.models.dialects.reading import ParsedCall, ParsedCalls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[add(a=1, b=-2.5)]", [ParsedCall("add", {"a": 1, "b": -2.5})]),
        ("[f(), g.h-2( x = None )]", [ParsedCall("f", {}), ParsedCall("g.h-2", {"x": None})]),
        (
            "<|python_start|>[f(a=[True, null, 'x'], b={\"k\": {'j': 1e3}})]<|python_end|>",
            [ParsedCall("f", {"a": [True, None, "x"], "b": {"k": {"j": 1000.0}}})],
        ),
        (
            r"[f(a='it\'s', b='\u00e9\n', c='\d')]",
            [ParsedCall("f", {"a": "it's", "b": "é\n", "c": r"\d"})],
        ),
        ("[f(a='it's raw', b='x\ny')]", [ParsedCall("f", {"a": "it's raw", "b": "x\ny"})]),
        ("[f(a='', b=')]')]", [ParsedCall("f", {"a": "", "b": ")]"})]),
    ],
)
def test_calls_are_read(text: str, calls: list[ParsedCall]) -> None:
    assert pythonic(text, ()) == ParsedCalls("", tuple(calls))


@pytest.mark.parametrize("text", ["[1, 2]", "f(a=1)", "[]", "See [a](b).", ""])
def test_other_lists_are_answers(text: str) -> None:
    assert pythonic(text, ()) == ParsedCalls(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[f(1)]", "= should follow"),
        ("[f(a=g())]", "no value"),
        ("[f(a='x)]", "without its end"),
        ("[f(a=1)] Done.", "text after the calls"),
        ("[f(a=1)", "should follow"),
        ("[f(a=" + "[" * 1000, "nested"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, why: str) -> None:
    found = pythonic(text, ())
    assert found.content == text and found.calls == () and why in found.faults[0]


def test_what_stands_between_marks_is_taken_out_of_the_content() -> None:
    text = "So: <|tool_call_start|>[f(a='<|x|>')]<|tool_call_end|>"
    assert lfm(text, ()) == ParsedCalls("So:", (ParsedCall("f", {"a": "<|x|>"}),))
    (fault,) = lfm("<|tool_call_start|>f(a=1)", ()).faults
    assert "<|tool_call_end|> should follow" in fault
