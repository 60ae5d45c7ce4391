"""Reads a chat completion request as OpenAI defines it, strictly, and makes the objects that answer
it.

A field that would have no effect is refused. Otherwise a caller who asks, for example, for
log-probabilities would get an answer without them and not know why.
"""

import json
import os
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.records.settings import MAX_TOP_K
from engine.serving.messages import BadMessages, check_size, checked_messages, checked_tools
from engine.worker.network.sampler import SamplingParams
from envs.json_types import ChatMessage, JsonObject, ToolSchema

# A completion, or a piece of one, as OpenAI spells it.
Reply = dict[str, Any]

MAX_TOKENS = 32_768  # the longest answer; the model's context may allow fewer tokens
DEFAULT_TOKENS = 512  # the longest answer if the request sets no limit
MAX_STOPS = 8  # stop strings that take effect; further ones are ignored
MAX_ANSWERS = 16  # the largest `n` of a request


class Refused(Exception):
    """A request that cannot be served: `status` is the HTTP status, and `message` is the text of
    the OpenAI-shaped error that answers it."""

    def __init__(self, status: int, message: str) -> None:
        """Refuse a request with the HTTP status `status`. `message` tells the caller why."""
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True)
class ChatRequest:
    """The fields of a chat completion request that have an effect; others are refused.

    The two below are not OpenAI's. Together they let a client continue an interrupted answer from
    exactly the same tokens.

    Attributes:
        begun_ids: ids of the tokens that the answer begins with (`begun_token_ids`); only the
            tokens after them are sampled and sent.
        return_token_ids: whether each streamed piece contains the ids that were sampled for it
            (in `token_ids` of its choice, as vLLM calls them).
    """

    model: str
    messages: list[ChatMessage]
    tools: list[ToolSchema]
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    begun_ids: tuple[int, ...] = ()
    return_token_ids: bool = False


ACCEPTED = frozenset(
    "model messages tools max_tokens max_completion_tokens temperature top_p stop seed n stream "
    "stream_options user top_k min_p begun_token_ids return_token_ids".split()
)


def parse_chat(body: Any) -> ChatRequest:
    """Read a chat completion request from its decoded JSON body.

    Fields that are left out take OpenAI's defaults, with two exceptions: `max_tokens` is
    DEFAULT_TOKENS, and the seed is random.

    Raises:
        Refused: 400, naming the field, if one is unknown or wrong; 413 if the prompt is too large.
    """
    check_fields(body, ACCEPTED)
    messages, tools = _checked_prompt(body)
    params = _sampling_params(body)
    begun_ids = _checked_ids(body.get("begun_token_ids") or [])
    n = int(checked_number(body.get("n", 1), "n", low=1, high=MAX_ANSWERS))
    include_usage = _wants_usage(body)
    stream = bool(body.get("stream"))
    if stream and n > 1:
        raise Refused(400, "n must be 1 when streaming.")
    if begun_ids and not stream:
        raise Refused(400, "begun_token_ids needs stream.")
    return ChatRequest(
        model=str(body.get("model", "")),
        messages=messages,
        tools=tools,
        params=params,
        n=n,
        stream=stream,
        include_usage=include_usage,
        begun_ids=begun_ids,
        return_token_ids=bool(body.get("return_token_ids")),
    )


def check_fields(body: Any, accepted: Collection[str]) -> None:
    """Raise Refused (400) if a decoded request body is no JSON object, or has a field that is not
    in `accepted`."""
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.")
    unknown = sorted(set(body) - set(accepted))
    if unknown:
        raise Refused(400, f"Not supported: {', '.join(unknown)}.")


def _checked_prompt(body: JsonObject) -> tuple[list[ChatMessage], list[ToolSchema]]:
    """Return the messages and the tools of a request. Raises Refused (400) if they are wrong,
    Refused (413) if they are too large."""
    try:
        messages = checked_messages(body.get("messages"))
        tools = checked_tools(body.get("tools") or [])
        check_size(messages, tools)
    except BadMessages as error:
        raise Refused(413 if error.is_too_large else 400, str(error)) from error
    # Chat templates expect a text, which a message with tool calls may lack.
    with_text = [message | {"content": message.get("content") or ""} for message in messages]
    return with_text, tools


def _wants_usage(body: JsonObject) -> bool:
    """Tell whether a stream is to end with the numbers of tokens. Raises Refused (400) if
    `stream_options` is no object."""
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise Refused(400, "stream_options must be an object.")
    return bool(stream_options.get("include_usage"))


def _sampling_params(body: Mapping[str, Any]) -> SamplingParams:
    """Return how the request's answers are sampled, with a random seed if the request names none.
    Only the first MAX_STOPS stop strings take effect. Raises Refused (400) if a field is wrong."""
    stop = _checked_stop(body.get("stop") or [])
    # `or`, because null and 0 count as left out.
    token_limit = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
    max_tokens = checked_number(token_limit, "max_tokens", low=1, high=MAX_TOKENS)
    temperature = checked_number(body.get("temperature", 1.0), "temperature", low=0, high=2)
    top_p = checked_number(body.get("top_p", 1.0), "top_p", low=1e-6, high=1)  # 0 keeps no token
    seed = _seed(body)
    # As with vLLM, -1 and 0 both mean that top_k is off.
    top_k = checked_number(body.get("top_k", 0), "top_k", low=-1, high=MAX_TOP_K)
    return SamplingParams(
        max_tokens=int(max_tokens),
        temperature=temperature,
        top_p=top_p,
        stop=tuple(stop[:MAX_STOPS]),
        seed=seed,
        top_k=max(0, int(top_k)),
        min_p=checked_number(body.get("min_p", 0.0), "min_p", low=0, high=1),
    )


def _seed(body: Mapping[str, Any]) -> int:
    """Return the seed that the request names, or a random one. Raises Refused (400) if the seed is
    not a number from 0 to 2^53."""
    if body.get("seed") is None:
        return fresh_seed()
    return int(checked_number(body["seed"], "seed", low=0, high=2**53))


def _checked_ids(ids: Any) -> tuple[int, ...]:
    """Check the ids of the tokens that an answer begins with, and return them as a tuple.

    Raises Refused (400) if they are not a list of whole numbers, or too many for one answer.
    """
    # `type(...) is int`, because isinstance would also accept booleans.
    if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
        raise Refused(400, "begun_token_ids must be a list of token ids.")
    if len(ids) > MAX_TOKENS:
        raise Refused(400, f"begun_token_ids has {len(ids)} ids; at most {MAX_TOKENS}.")
    return tuple(ids)


def _checked_stop(stop: Any) -> list[str]:
    """Return the stop strings as a list; a single string becomes a list of one. Raises Refused
    (400) if one of them is empty or not a string."""
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(item, str) and item for item in stop):
        raise Refused(400, "stop must be a string or a list of strings.")
    return stop


def checked_number(value: Any, name: str, low: float, high: float) -> float:
    """Return `value` if it is a number from `low` to `high`, both included. Otherwise raise Refused
    (400), naming the field `name`."""
    # A bool counts as an int in Python; NaN fails the comparison.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise Refused(400, f"{name} must be a number from {low:g} to {high:g}, got {value!r}.")
    return value


def fresh_seed() -> int:
    """Return a random seed of 48 bits, for a request that names none."""
    return int.from_bytes(os.urandom(6), "big")


def text_before_stop(text: str, stop: tuple[str, ...]) -> str:
    """Return the text up to the first stop string that occurs in it, or all of it if none does."""
    for stop_string in stop:
        text = text.split(stop_string)[0]
    return text


def ends_in_partial_stop(text: str, stop: tuple[str, ...]) -> bool:
    """Tell whether the text ends with the beginning of a stop string.

    Such an ending must not be sent before further tokens show whether the stop string is completed.
    """
    return any(
        text.endswith(stop_string[:length])
        for stop_string in stop
        for length in range(1, len(stop_string))  # a complete stop string has ended the answer
    )


def tool_call_as_openai(tool_call: JsonObject) -> JsonObject:
    """Return a parsed tool call in OpenAI's form, in which the arguments are a JSON string instead
    of an object."""
    function = tool_call["function"]
    arguments = function["arguments"]
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return tool_call | {"function": {"name": function["name"], "arguments": arguments_text}}


def reply_fields(object_name: str, id_prefix: str, model: str) -> Reply:
    """Return the fields with which every reply of OpenAI's API begins: a new random id after
    `id_prefix`, the kind of object (`object_name`), the time in seconds, and the model that
    answers."""
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex[:24]}",
        "object": object_name,
        "created": int(time.time()),
        "model": model,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return OpenAI's `usage` object with these numbers of tokens and their sum;
    `completion_tokens` counts those of all completions."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
