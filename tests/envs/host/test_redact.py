"""Secrets are found in whatever a process may have written them as."""

import base64
import json
import urllib.parse

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.home.sanitize import Redactor, clean_text
from envs.host.redact import MIN_LENGTH, SecretFilter

MARK = "[secret K]"
# Characters that are shown: others are cleaned away, which may leave less than MIN_LENGTH.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"]).filter(
    lambda character: clean_text(character) == character
)
SECRETS = st.text(CHARACTERS, min_size=MIN_LENGTH)
AROUND = st.text(CHARACTERS, max_size=7)
WAYS = {
    "plain": str,
    "percent": lambda text: urllib.parse.quote(text, safe=""),
    "path": urllib.parse.quote,
    "form": urllib.parse.quote_plus,
    "json": json.dumps,
    "json, not ascii": lambda text: json.dumps(text, ensure_ascii=False),
    "repr": repr,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64, url": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
}


def everywhere(secret: str, text: str) -> list[str]:
    """`text` as the env process and as the engine let it out."""
    inside = SecretFilter([("K", secret)])
    return [
        inside.in_text(text),
        inside.in_bytes(text.encode()).decode(),
        inside.in_json([{text: text}])[0].popitem()[1],
        Redactor({"K": secret}).text(text),
    ]


@pytest.mark.parametrize("way", WAYS)
@given(before=AROUND, secret=SECRETS, after=AROUND)
def test_a_secret_is_found_in_every_form(way: str, before: str, secret: str, after: str):
    written = WAYS[way](before + secret + after)
    for shown in everywhere(secret, written):
        assert MARK in shown


@given(before=st.binary(max_size=5), secret=SECRETS, after=st.binary(max_size=5))
def test_base64_hides_all_but_what_neighbours_share(before: bytes, secret: str, after: bytes):
    raw = secret.encode()
    whole = base64.b64encode(before + raw + after).decode()
    shown = SecretFilter([("K", secret)]).in_text(whole)
    assume(shown.count(MARK) == 1)
    left = len(shown) - len(MARK)
    # Two characters at each end may belong to a neighbour too.
    assert left <= len(base64.b64encode(before)) + len(base64.b64encode(after)) + 4


@given(data=st.binary(), secret=SECRETS)
def test_bytes_that_hold_no_secret_are_left_as_they_are(data: bytes, secret: str):
    assume(SecretFilter([("K", secret)]).in_text(text := data.decode("utf-8", "replace")) == text)
    assert SecretFilter([("K", secret)]).in_bytes(data) == data


def test_the_shortest_secret_is_found_and_a_shorter_one_is_not():
    for shown in everywhere("s3kt", "a s3kt here"):
        assert shown == f"a {MARK} here"
    for shown in everywhere("s3k", "a s3k here"):
        assert shown == "a s3k here"


def test_the_name_that_replaces_a_secret_is_not_searched_again():
    assert SecretFilter([("A", "opensesame"), ("B", "secret")]).in_text("opensesame secret") == (
        "[secret A] [secret B]"
    )
