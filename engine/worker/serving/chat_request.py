"""A chat completion request as OpenAI writes it, read strictly, and the shapes that answer it.

A field that would be ignored is refused: a caller who asks for log-probabilities should not take
their absence for an answer.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from engine.worker.network.sampler import SamplingParams
from envs.json_types import ChatMessage, ToolSchema

# A completion, or a piece of one, as OpenAI spells it.
Reply = dict[str, Any]

MAX_TOKENS = 4096
MAX_ANSWERS = 16
MAX_MESSAGES = 1_000
MAX_TOOLS = 128
MAX_PROMPT_CHARS = 1_000_000  # counted before anything is turned into tokens


class Refused(Exception):
    """A request that is answered with an OpenAI-shaped error."""

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
    "stream_options user".split()
)


def parse_chat(body: Any) -> ChatRequest:
    """Read a chat completion request.

    Raises:
        Refused: 400, naming the field.
    """
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.")
    unknown = sorted(set(body) - ACCEPTED)
    if unknown:
        raise Refused(400, f"Not supported: {', '.join(unknown)}.")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list with at least one message.")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in (
            "system",
            "user",
            "assistant",
            "tool",
        ):
            raise Refused(400, "Each message needs a role: system, user, assistant or tool.")
        if not isinstance(message.get("content") or "", str):
            raise Refused(400, "content must be text.")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(400, "tools must be a list of objects.")
    _check_size(messages, tools)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refused(400, "stop must be a string or a list of strings.")
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 512
    seed = body.get("seed")
    params = SamplingParams(
        max_tokens=int(number(limit, "max_tokens", 1, MAX_TOKENS)),
        temperature=number(body.get("temperature", 1.0), "temperature", 0, 2),
        top_p=number(body.get("top_p", 1.0), "top_p", 1e-6, 1),
        stop=tuple(stop[:8]),
        seed=int(number(seed, "seed", 0, 2**53)) if seed is not None else fresh_seed(),
    )
    stream = bool(body.get("stream"))
    n = int(number(body.get("n", 1), "n", 1, MAX_ANSWERS))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused(400, "stream_options must be an object.")
    if stream and n > 1:
        raise Refused(400, "n must be 1 when streaming.")
    return ChatRequest(
        model=str(body.get("model", "")),
        messages=[m | {"content": m.get("content") or ""} for m in messages],
        tools=tools,
        params=params,
        n=n,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
    )


def _check_size(messages: list[ChatMessage], tools: list[Any]) -> None:
    """Refuse a prompt that would cost seconds before it is found to be too long."""
    if len(messages) > MAX_MESSAGES or len(tools) > MAX_TOOLS:
        raise Refused(413, f"At most {MAX_MESSAGES} messages and {MAX_TOOLS} tools.")
    if len(json.dumps([messages, tools], ensure_ascii=False)) > MAX_PROMPT_CHARS:
        raise Refused(413, f"The prompt has more than {MAX_PROMPT_CHARS} characters.")


def number(value: Any, name: str, low: float, high: float) -> float:
    """A finite number within bounds. Raises Refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(400, f"{name} must be a number from {low:g} to {high:g}, got {value!r}.")
    return value


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(6), "big")


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text up to the first stop string."""
    for mark in stop:
        text = text.split(mark)[0]
    return text


def held_back(text: str, stop: tuple[str, ...]) -> bool:
    """Whether the text ends in the beginning of a stop string, so more must be seen first."""
    return any(text.endswith(mark[:size]) for mark in stop for size in range(1, len(mark)))


def as_openai(call: ChatMessage) -> ChatMessage:
    """A parsed call as clients expect it: arguments as a JSON string."""
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return call | {"function": {"name": function["name"], "arguments": text}}


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
