"""Requests for the log-probabilities of given tokens, and what answers them."""

from typing import Any

import pytest

from engine.worker.gateway.chat_request import Refused
from engine.worker.serving.token_logprobs import logprobs_reply, parse_logprobs

BODY: dict[str, Any] = {
    "model": "pebble",
    "prompt": [5, 6, 7],
    "max_tokens": 0,
    "echo": True,
    "logprobs": 0,
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"echo": False}, "/v1/chat/completions"),
        ({"logprobs": None}, "/v1/chat/completions"),
        ({"logprobs": 5}, "0 or 1"),
        ({"max_tokens": 8}, "max_tokens"),
        ({"max_tokens": 1, "temperature": 1.0}, "temperature"),
        ({"prompt": "some text"}, "token ids"),
        ({"prompt": []}, "token ids"),
        ({"prompt": [1, True]}, "token ids"),
        ({"n": 2}, "n must be 1"),
        ({"stream": True}, "streamed"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_is_no_such_request_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        parse_logprobs(BODY | change)
    assert caught.value.status == 400


def test_a_reply_has_a_number_for_every_token_but_the_first() -> None:
    request = parse_logprobs(BODY | {"max_tokens": 1, "temperature": 0})
    assert request.wants_next_token and request.ids == [5, 6, 7]
    texts = {5: "a", 6: "bc", 7: "d", 8: "e"}
    reply = logprobs_reply(request, [-0.5, -1.0], (8, -0.1), lambda ids: texts[ids[0]])
    (choice,) = reply["choices"]
    assert choice["text"] == "abcde"
    assert choice["logprobs"] == {
        "tokens": ["a", "bc", "d", "e"],
        "token_logprobs": [None, -0.5, -1.0, -0.1],
        "top_logprobs": None,
        "text_offset": [0, 1, 3, 4],
    }
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
