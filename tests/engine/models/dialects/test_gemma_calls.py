"""Gemma's own notation."""

import pytest

from engine.models.dialects.gemma_calls import gemma
from engine.models.dialects.reading import ParsedCall, ParsedCalls


def test_values_of_every_type_are_read() -> None:
    text = (
        'Hm.<|tool_call>call:f{a:<|"|>x, }y<|"|>,b:-1.5e2,c:[1,None,true],'
        'd:{<|"|>k<|"|>:{}},e:[]}<tool_call|><|tool_response>'
    )
    arguments = {"a": "x, }y", "b": -150.0, "c": [1, None, True], "d": {"k": {}}, "e": []}
    assert gemma(text, ()) == ParsedCalls("Hm.", (ParsedCall("f", arguments),))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("f{}", "no call:name"),
        ("call:f{a:", "no value"),
        ('call:f{a:<|"|>x}', "without its end"),
        ("call:f{a:1 b:2}", ", should follow"),
        ("call:f{:1}", "no name of an argument"),
        ("call:f{a:" + "9" * 5000 + "}", "a number of 5000"),
        ("call:f{a:" + "[" * 5000, "nested"),
        ("call:f{a:1e999}", "no number"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(call: str, why: str) -> None:
    found = gemma(f"<|tool_call>{call}<tool_call|>", ())
    assert found.calls == () and why in found.faults[0]
