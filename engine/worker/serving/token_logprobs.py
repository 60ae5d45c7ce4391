"""The route `/v1/completions` as far as it is served: the log-probabilities of given tokens.

The request is the one with which evaluation harnesses rate texts on OpenAI-compatible servers: a
prompt of token ids, `echo` and `logprobs`. To generate more than one token, clients use
`/v1/chat/completions`, which applies the chat template.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.worker.gateway.chat_request import Refused, Reply, check_fields, reply_fields, usage
from envs.json_types import JsonObject

ACCEPTED = frozenset(
    "model prompt max_tokens temperature top_p seed n echo logprobs stream user".split()
)
MAX_IDS = 131_072  # in one prompt; `Served.rate` checks the model's own limit


@dataclass(frozen=True)
class LogprobsRequest:
    """A request to rate the ids of one prompt with the model called `model`. `wants_next_token`
    asks for the likeliest next token too."""

    model: str
    ids: list[int]
    wants_next_token: bool


def parse_logprobs(body: Any) -> LogprobsRequest:
    """Read a completion request that asks for the log-probabilities of its own prompt, from its
    decoded JSON body.

    Raises:
        Refused: 400, naming the field that is unknown or asks for something else.
    """
    check_fields(body, ACCEPTED)
    _refuse_generating(body)
    ids = body.get("prompt")
    # `type(...) is int`, because isinstance would also accept booleans.
    is_list_of_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not is_list_of_ids or not ids or len(ids) > MAX_IDS:
        raise Refused(400, f"prompt must be a list of 1 to {MAX_IDS:,} token ids.")
    wants_next_token = body.get("max_tokens", 0) == 1
    return LogprobsRequest(str(body.get("model", "")), ids, wants_next_token)


def _refuse_generating(body: JsonObject) -> None:
    """Raise Refused (400) if the request asks for more than the log-probabilities of its prompt and
    the likeliest next token."""
    if body.get("echo") is not True or body.get("logprobs") not in (0, 1):
        raise Refused(
            400,
            "Completions here give the log-probabilities of a prompt: set echo true and logprobs "
            "to 0 or 1. To have something written, use /v1/chat/completions.",
        )
    max_tokens = body.get("max_tokens", 0)
    if max_tokens not in (0, 1):
        raise Refused(400, "max_tokens must be 0 or 1.")
    if max_tokens == 1 and body.get("temperature") != 0:
        raise Refused(400, "temperature must be 0: what follows the prompt is the likeliest token.")
    if body.get("stream") or body.get("n", 1) != 1:
        raise Refused(400, "n must be 1, and nothing is streamed.")


def logprobs_reply(
    request: LogprobsRequest,
    logprobs: list[float],
    continuation: tuple[int, float] | None,
    decode: Callable[[list[int]], str],
) -> Reply:
    """Return OpenAI's text_completion object with the prompt's tokens and their log-probabilities.
    The first token has none (null), since nothing precedes it.

    Args:
        logprobs: the log-probabilities of every id but the first.
        continuation: the token after the prompt with its log-probability; None if it was not asked
            for.
        decode: turns ids into text.
    """
    ids = list(request.ids)
    token_logprobs: list[float | None] = [None, *logprobs]
    if continuation is not None:
        next_token, next_logprob = continuation
        ids.append(next_token)
        token_logprobs.append(next_logprob)
    choice = _choice([decode([token]) for token in ids], token_logprobs)
    fields = reply_fields("text_completion", "cmpl", request.model)
    sampled_count = len(ids) - len(request.ids)
    return fields | {"choices": [choice], "usage": usage(len(request.ids), sampled_count)}


def _choice(tokens: list[str], token_logprobs: list[float | None]) -> Reply:
    """Return the only entry of a reply's `choices`, with the tokens' texts and log-probabilities.
    `top_logprobs` is null, as no other tokens are rated."""
    offsets = [0]  # where each token begins in the text, in characters
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "index": 0,
        "text": "".join(tokens),
        "logprobs": {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        },
        "finish_reason": "length",  # OpenAI's word for an end by `max_tokens`
    }
