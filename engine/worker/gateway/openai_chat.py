"""The route `/v1/chat/completions` for programs, which is more lenient than that of a deployment.

Programs send fields that the run decides (how tokens are drawn) or that mean nothing here; these
are accepted. A field that asks for another form of answer than the one given is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from engine.worker.gateway.asked import (
    Answer,
    Question,
    checked_size,
    conversation,
    fields_of,
    stop_strings,
    token_limit,
)
from engine.worker.gateway.chat_request import Refused, Reply, reply_fields, usage
from envs.json_types import JsonObject

_ACTED_ON = (
    "model messages tools tool_choice max_tokens max_completion_tokens stop n stream "
    "stream_options response_format"
).split()
# Fields that are accepted without effect: the run decides how tokens are drawn, and the others do
# not concern the answer.
DECIDED_BY_THE_RUN = (
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty "
    "user store metadata service_tier parallel_tool_calls prompt_cache_key prompt_cache_retention "
    "safety_identifier reasoning_effort verbosity"
).split()


def read(body: Any) -> Question:
    """Read what a program asks from the decoded JSON body of its request: the conversation, the
    tools that may be called, and the limits of the answer.

    Raises Refused (400) for a field that is unknown or wrong, or Refused (413) for a prompt that is
    too large.
    """
    fields = fields_of(body, _ACTED_ON, DECIDED_BY_THE_RUN)
    _require_one_text(fields)
    options = fields.get("stream_options", {})
    tools = fields.get("tools", [])
    return checked_size(
        Question(
            model=str(fields.get("model", "")),
            messages=conversation(fields.get("messages")),
            tools=tools if _may_call(fields.get("tool_choice", "auto")) else [],
            max_tokens=token_limit(
                fields.get("max_completion_tokens", fields.get("max_tokens")), "max_tokens"
            ),
            stop=stop_strings(fields.get("stop")),
            stream=bool(fields.get("stream")),
            include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )
    )


def _require_one_text(fields: Mapping[str, Any]) -> None:
    """Raise Refused (400) if a request with these fields asks for several answers, or for one in
    another form than plain text."""
    if fields.get("n", 1) != 1:
        raise Refused(400, "n must be 1: a rollout has one answer to each question.")
    kind = fields.get("response_format", {"type": "text"})
    if not isinstance(kind, dict) or kind.get("type") != "text":
        raise Refused(400, "response_format must be text: nothing else is enforced here.")


def _may_call(choice: Any) -> bool:
    """Tell whether `tool_choice` allows calls. Raises Refused (400) if it demands a call."""
    if choice not in ("auto", "none"):
        raise Refused(400, "tool_choice must be auto or none: no call can be enforced here.")
    return choice == "auto"


def reply(question: Question, answer: Answer) -> Reply:
    """Return the answer as OpenAI's chat.completion object, for a reply that is not streamed."""
    message: JsonObject = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.text or None  # as OpenAI writes a message of calls alone
        message["tool_calls"] = answer.tool_calls
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    counts = usage(answer.prompt_tokens, answer.completion_tokens)
    fields = reply_fields("chat.completion", "chatcmpl", question.model)
    return fields | {"choices": [choice], "usage": counts}


def events(question: Question, answer: Answer) -> list[str]:
    """Return the answer as server-sent events: chat.completion.chunk objects, then [DONE].

    Each event is one line of JSON, in which a line end of the answer is an escape. So no text of
    the model can end an event or begin another.
    """
    common = reply_fields("chat.completion.chunk", "chatcmpl", question.model)
    pieces = [_choice(delta, None) for delta in _deltas(answer)]
    pieces.append(_choice({}, answer.finish))
    lines = [json.dumps(common | {"choices": [piece]}) for piece in pieces]
    if question.include_usage:
        counts = usage(answer.prompt_tokens, answer.completion_tokens)
        lines.append(json.dumps(common | {"choices": [], "usage": counts}))
    return [f"data: {line}\n\n" for line in [*lines, "[DONE]"]]


def _deltas(answer: Answer) -> list[JsonObject]:
    """Split the answer into the parts that a program reads from a stream one after the other: the
    role, then thoughts, text and calls, if there are any."""
    deltas: list[JsonObject] = [{"role": "assistant", "content": ""}]
    if answer.reasoning:
        deltas.append({"reasoning_content": answer.reasoning})
    if answer.text:
        deltas.append({"content": answer.text})
    if answer.tool_calls:
        numbered = [{**call, "index": index} for index, call in enumerate(answer.tool_calls)]
        deltas.append({"tool_calls": numbered})
    return deltas


def _choice(delta: JsonObject, finish: str | None) -> JsonObject:
    """Return the one choice of a streamed chunk. `delta` holds a part of the answer; `finish` says
    why the answer ended, and is None before its end."""
    return {"index": 0, "delta": delta, "finish_reason": finish}
