"""A chat completion request as OpenAI writes it, read strictly, and the shapes that answer it.

A field that would be ignored is refused: a caller who asks for log-probabilities should not take
their absence for an answer.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.records.settings import MAX_TOP_K
from engine.worker.network.sampler import SamplingParams
from envs.json_types import ChatMessage, JsonObject, ToolSchema

# A completion, or a piece of one, as OpenAI spells it.
Reply = dict[str, Any]

MAX_TOKENS = 4096  # of one answer
DEFAULT_TOKENS = 512  # of one answer, where the request names no number
MAX_STOPS = 8  # stop strings that take effect; further ones are ignored
MAX_ANSWERS = 16
ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 1_000
MAX_TOOLS = 128
MAX_PROMPT_CHARS = 1_000_000  # counted before anything is turned into tokens


class Refused(Exception):
    """A request that cannot be served: `status` is the HTTP status and `message` the text of the
    OpenAI-shaped error that answers it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True)
class ChatRequest:
    """The fields of a chat completion that are acted on; others are refused."""

    model: str
    messages: list[ChatMessage]
    tools: list[ToolSchema]
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool


ACCEPTED = frozenset(
    "model messages tools max_tokens max_completion_tokens temperature top_p stop seed n stream "
    "stream_options user top_k min_p".split()
)


def parse_chat(body: Any) -> ChatRequest:
    """Read a chat completion request, the decoded JSON body.

    Fields that are left out take OpenAI's defaults, with two exceptions: `max_tokens` is
    DEFAULT_TOKENS, and the seed is random.

    Raises:
        Refused: 400, naming the field that is unknown or wrong, or 413 for a prompt that is too
            large.
    """
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.")
    unknown = sorted(set(body) - ACCEPTED)
    if unknown:
        raise Refused(400, f"Not supported: {', '.join(unknown)}.")
    messages = _checked_messages(body.get("messages"))
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(400, "tools must be a list of objects.")
    _check_size(messages, tools)
    params = _sampling_params(body)
    stream = bool(body.get("stream"))
    n = int(checked_number(body.get("n", 1), "n", low=1, high=MAX_ANSWERS))
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise Refused(400, "stream_options must be an object.")
    if stream and n > 1:
        raise Refused(400, "n must be 1 when streaming.")
    return ChatRequest(
        model=str(body.get("model", "")),
        # Chat templates expect text, also where a message with tool calls has none.
        messages=[m | {"content": m.get("content") or ""} for m in messages],
        tools=tools,
        params=params,
        n=n,
        stream=stream,
        include_usage=bool(stream_options.get("include_usage")),
    )


def _sampling_params(body: Mapping[str, Any]) -> SamplingParams:
    """How the request's answers are sampled, with a random seed if it names none. Only the first
    MAX_STOPS stop strings take effect. Raises Refused (400) when a field is wrong."""
    stop = _checked_stop(body.get("stop") or [])
    token_limit = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
    seed = body.get("seed")
    return SamplingParams(
        max_tokens=int(checked_number(token_limit, "max_tokens", low=1, high=MAX_TOKENS)),
        temperature=checked_number(body.get("temperature", 1.0), "temperature", low=0, high=2),
        top_p=checked_number(body.get("top_p", 1.0), "top_p", low=1e-6, high=1),  # 0 keeps no token
        stop=tuple(stop[:MAX_STOPS]),
        seed=fresh_seed() if seed is None else int(checked_number(seed, "seed", low=0, high=2**53)),
        top_k=max(0, int(checked_number(body.get("top_k", 0), "top_k", low=-1, high=MAX_TOP_K))),
        min_p=checked_number(body.get("min_p", 0.0), "min_p", low=0, high=1),
    )


def _checked_messages(messages: Any) -> list[ChatMessage]:
    """Return `messages` unchanged if they are a list of at least one message, each with a role in
    ROLES, and with text or nothing as content. Raises Refused (400) otherwise."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list with at least one message.")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Refused(400, "Each message needs a role: system, user, assistant or tool.")
        if not isinstance(message.get("content") or "", str):
            raise Refused(400, "content must be text.")
    return messages


def _checked_stop(stop: Any) -> list[str]:
    """The stop strings as a list; a single string becomes a list of one. Raises Refused (400) when
    one of them is empty or not a string."""
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(item, str) and item for item in stop):
        raise Refused(400, "stop must be a string or a list of strings.")
    return stop


def _check_size(messages: list[ChatMessage], tools: list[Any]) -> None:
    """Raises Refused (413) for a prompt with too many messages, tools or characters. To be called
    before the prompt is rendered, which could take seconds for a large one."""
    if len(messages) > MAX_MESSAGES or len(tools) > MAX_TOOLS:
        raise Refused(413, f"At most {MAX_MESSAGES} messages and {MAX_TOOLS} tools.")
    if len(json.dumps([messages, tools], ensure_ascii=False)) > MAX_PROMPT_CHARS:
        raise Refused(413, f"The prompt has more than {MAX_PROMPT_CHARS} characters.")


def checked_number(value: Any, name: str, low: float, high: float) -> float:
    """Return `value` if it is a number from `low` to `high`, both included. Raises Refused (400)
    otherwise, naming the field `name`."""
    # A bool counts as an int in Python; NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(400, f"{name} must be a number from {low:g} to {high:g}, got {value!r}.")
    return value


def fresh_seed() -> int:
    """A random seed of 48 bits, for a request that names none."""
    return int.from_bytes(os.urandom(6), "big")


def text_before_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to the first stop string that occurs in it; all of it if none does."""
    for stop_string in stop:
        text = text.split(stop_string)[0]
    return text


def ends_in_partial_stop(text: str, stop: tuple[str, ...]) -> bool:
    """Whether the text ends with the beginning of a stop string. That end must not be sent before
    further tokens show whether the stop string is completed."""
    return any(
        text.endswith(stop_string[:length])
        for stop_string in stop
        for length in range(1, len(stop_string))
    )


def tool_call_as_openai(tool_call: JsonObject) -> JsonObject:
    """A parsed tool call in OpenAI's form, in which the arguments are a JSON string and not an
    object."""
    function = tool_call["function"]
    arguments = function["arguments"]
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return tool_call | {"function": {"name": function["name"], "arguments": arguments_text}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's `usage` object; `completion_tokens` is the sum over all completions."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
