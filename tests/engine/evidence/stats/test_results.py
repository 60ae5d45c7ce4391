"""How an answer's messages are shown."""

import pytest

from engine.evidence.stats.results import content_of


@pytest.mark.parametrize("arguments", [{"room": "attic"}, '{"room": "attic"}'])
def test_arguments_of_a_tool_call_are_shown_as_json_whether_text_or_object(arguments):
    call = {"type": "function", "function": {"name": "set_heat", "arguments": arguments}}
    shown = '→ set_heat({"room": "attic"})'
    assert content_of({"role": "assistant", "content": None, "tool_calls": [call]}) == shown
    assert content_of({"content": "Done.", "tool_calls": [call]}) == f"Done.\n{shown}"
