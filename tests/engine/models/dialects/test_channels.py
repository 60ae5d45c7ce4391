"""Replies in channels, as gpt-oss and Muse write them."""

from engine.models.dialects.channels import HARMONY_THOUGHTS, MUSE_THOUGHTS, harmony, muse
from engine.models.dialects.reading import ParsedCall, ParsedCalls

ADD = ParsedCall("add", {"a": 1})
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"


def test_analysis_is_reasoning_and_the_final_channel_is_content() -> None:
    thought, rest = HARMONY_THOUGHTS.take_off(
        THOUGHT + "<|channel|>final<|message|>Four.<|return|>"
    )
    assert thought == "Let me see." and harmony(rest, ()) == ParsedCalls("Four.")


def test_the_recipient_may_stand_before_or_after_the_channel() -> None:
    thought, rest = HARMONY_THOUGHTS.take_off(f"{THOUGHT}{CALL}<|call|>")
    assert thought == "Let me see." and harmony(rest, ()) == ParsedCalls("", (ADD,))
    earlier = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
    assert harmony(earlier, ()) == ParsedCalls("", (ADD,))


def test_what_is_said_before_a_call_is_content() -> None:
    preamble = "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant"
    assert harmony(preamble + CALL, ()) == ParsedCalls("I will add.", (ADD,))


def test_a_thought_that_was_cut_is_still_reasoning() -> None:
    thought, rest = HARMONY_THOUGHTS.take_off("<|channel|>analysis<|message|>Let me")
    assert thought == "Let me" and harmony(rest, ()) == ParsedCalls("")


def test_a_reply_without_channels_is_content() -> None:
    assert HARMONY_THOUGHTS.take_off("Four.") == (None, "Four.")
    assert harmony("Four.", ()) == ParsedCalls("Four.")


def test_a_call_that_cannot_be_read_says_why() -> None:
    for text, why in [(CALL[:-1], "not JSON"), (CALL + " x", "text after the arguments of add")]:
        found = harmony(text, ())
        assert found.calls == () and why in found.faults[0]
    (fault,) = muse(' to=f<|message|><atem:invoke name="f"> x', ()).faults
    assert "</atem:invoke> should follow" in fault


def test_muse_writes_to_itself_to_tools_and_to_the_user() -> None:
    text = (
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n"
        '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
        '<atem:invoke name="g">\n</atem:invoke>\n</atem:function_calls><|eot|>'
    )
    thought, rest = MUSE_THOUGHTS.take_off(text)
    assert thought == "Hm."
    assert muse(rest, ()) == ParsedCalls("", (ParsedCall("f", {"a": 1}), ParsedCall("g", {})))
    assert muse(" to=user<|message|>Yes.<|eot|>", ()) == ParsedCalls("Yes.")
