"""Untrusted text: what is taken out, what stays, and secrets in every dress."""

import base64
import json
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.filters import Where
from engine.home.sanitize import Redactor, clean_text, clean_value, clip, json_chars, one_line


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://evil\x07link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdevice\x1b\\after", "after"),
        ("\x9b31mc1", "c1"),
        ("bell\x07 back\x08 nul\x00", "bell back nul"),
        ("a\u202eb\u2066c\u200fd", "abcd"),
        ("zero\u200b\u200d\ufeffwidth\u2060", "zerowidth"),
        ("tag\U000e0041\U000e007f", "tag"),
        ("soft\u00adhyphen", "softhyphen"),
        ("variation\U000e0100", "variation"),
        ("one\r\ntwo\u2028three\x85four", "one\ntwo\nthree\nfour"),
        ("lone \ud800 half", "lone \ufffd half"),
        ("tab\tand\nnewline stay", "tab\tand\nnewline stay"),
        ("naïve 日本語 العربية 😀 ∑", "naïve 日本語 العربية 😀 ∑"),
    ],
)
def test_what_a_reader_would_not_see_is_taken_out(dirty, clean):
    assert clean_text(dirty) == clean


@given(st.text(max_size=200))
def test_cleaning_twice_changes_nothing_more_and_always_encodes(text):
    once = clean_text(text)
    assert clean_text(once) == once
    once.encode("utf-8")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in once)


@given(st.text(min_size=1, max_size=500), st.integers(1, 300))
def test_clipping_keeps_both_ends_counts_what_it_left_out_and_never_lengthens(text, limit):
    cut = clip(text, limit)
    assert len(cut) <= max(limit, min(limit, 20) + len(" … [500 characters cut] … "))
    assert len(cut) <= len(text)
    if cut != text:
        assert "characters cut" in cut and cut[0] == text[0]
        assert f"[{len(text) - limit} " in cut


@pytest.mark.parametrize("limit", [1, 20, 40])
def test_a_text_that_the_mark_of_the_cut_would_not_shorten_stays_whole(limit):
    assert clip("forty", limit) == "forty"
    assert clip("The answer is forty", limit) == "The answer is forty"
    assert len(clip("x" * 400, limit)) < 60


def test_one_line_flattens_and_cuts():
    assert one_line("a\n  b\tc", 10) == "a b c"
    assert one_line("abcdefgh", 5) == "abcd…"


SECRET = "hunter2/+&=éü-key"


@pytest.mark.parametrize("shift", ["", "x", "xy", "user:"])
def test_secrets_are_hidden_plain_and_encoded(shift):
    redact = Redactor({"API_KEY": SECRET})
    long = f"{shift}{SECRET}:and more"
    for text in (
        SECRET,
        long,
        urllib.parse.quote(long, safe=""),
        urllib.parse.quote_plus(long),
        json.dumps(long),
    ):
        hidden = redact(text)
        assert "hunter2" not in hidden and "[secret API_KEY]" in hidden
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        hidden = redact(encode(long.encode()).decode())
        assert "[secret API_KEY]" in hidden
        kept = hidden.replace("[secret API_KEY]", "")
        assert len(kept) < len(long) + 8


def test_a_secret_split_by_an_invisible_mark_is_hidden():
    assert Redactor({"K": "opensesame"}).text("open\u200bses\x1b[0mame") == "[secret K]"


def test_values_shaped_like_known_tokens_are_hidden_though_nobody_named_them():
    redact = Redactor()
    for token in ("hf_" + "a" * 34, "sk-" + "b1" * 12, "ghp_" + "c" * 36, "AKIA" + "D" * 16):
        assert redact(f"token={token}!") == "token=[secret]!"
    assert redact("task-4 and risk-averse sk-short") == "task-4 and risk-averse sk-short"


def test_short_values_are_no_secrets():
    assert Redactor({"FLAG": "1", "MODE": "on"})("on 1 on") == "on 1 on"


def test_redacting_reaches_into_nested_values_and_keys():
    redact = Redactor({"K": "opensesame"})
    assert redact.value({"opensesame": ["x opensesame", {"n": float("nan"), "i": 3}]}) == {
        "[secret K]": ["x [secret K]", {"n": None, "i": 3}]
    }


def test_values_become_what_json_can_carry():
    cleaned = clean_value({"a": float("inf"), 1: ("x\x00", None, True)})
    assert cleaned == {"a": None, "1": ["x", None, True]}
    assert json_chars({"é": [1, 2]}) == len('{"é":[1,2]}')


@given(st.text(alphabet="abrew d.()[]<>=!+-*/%'\"0123456789,_:@\\\n", max_size=60))
def test_no_filter_text_does_anything_but_match_or_refuse(text):
    from engine.core.errors import UserError

    try:
        result = Where(text, ["reward", "a", "b"]).matches({"reward": 1.0, "a": "x"}, "t")
    except UserError as error:
        assert error.code == "BAD_ARGUMENT"
    else:
        assert isinstance(result, bool)
