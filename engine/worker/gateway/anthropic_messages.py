"""The route `/v1/messages`, for programs written for Anthropic's API: content in blocks, tools with
an `input_schema`, and results of tools inside user messages."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
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
from engine.worker.gateway.chat_request import Refused
from envs.json_types import ChatMessage, JsonObject, ToolSchema

_ACTED_ON = "model max_tokens messages system tools tool_choice stop_sequences stream".split()
_DECIDED_BY_THE_RUN = (
    "temperature top_p top_k metadata service_tier thinking container context_management "
    "output_config cache_control betas"
).split()
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THOUGHTS = ("thinking", "redacted_thinking")  # earlier thoughts, which programs send back


def read(body: Any) -> Question:
    """Read what a program asks from the decoded JSON body of its request: the conversation, the
    tools that may be called, and the limits of the answer.

    Raises Refused (400) for a field that is unknown or wrong, or Refused (413) for a prompt that is
    too large.
    """
    fields = fields_of(body, _ACTED_ON, _DECIDED_BY_THE_RUN)
    anthropic_messages = fields.get("messages")
    if not isinstance(anthropic_messages, list):
        raise Refused(400, "messages must be a list with at least one message.")
    messages: list[ChatMessage] = []
    for message in anthropic_messages:
        messages += _as_openai_messages(message)
    if fields.get("system"):
        messages.insert(0, {"role": "system", "content": _text_of(fields["system"])})
    return checked_size(
        Question(
            model=str(fields.get("model", "")),
            messages=conversation(messages),
            tools=_offered_tools(
                fields.get("tools", []), fields.get("tool_choice", {"type": "auto"})
            ),
            max_tokens=token_limit(fields.get("max_tokens"), "max_tokens"),
            stop=stop_strings(fields.get("stop_sequences")),
            stream=bool(fields.get("stream")),
        )
    )


def _offered_tools(tools: Any, choice: Any) -> list[ToolSchema]:
    """Return the tools in OpenAI's form, or [] if `choice`, the request's `tool_choice`, allows no
    call. Raises Refused (400) for one of the vendor's own tools, or if the request demands a
    call."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "none"):
        raise Refused(400, "tool_choice must be auto or none: no call can be enforced here.")
    if not isinstance(tools, list):
        raise Refused(400, "tools must be a list of objects.")
    schemas = [_as_openai_tool(tool) for tool in tools]
    return schemas if kind == "auto" else []


def _as_openai_tool(tool: Any) -> ToolSchema:
    """Convert one of Anthropic's tools to OpenAI's form. Raises Refused (400) if it has no schema
    of its arguments."""
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise Refused(400, "Each tool needs a name and an input_schema.")
    function = {
        "name": str(tool.get("name", "")),
        "description": str(tool.get("description", "")),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _as_openai_messages(message: Any) -> Iterator[ChatMessage]:
    """Yield the messages in OpenAI's form that one of Anthropic's messages becomes; results of
    tools come before the user's text. Raises Refused (400) for blocks other than text and tools."""
    if not isinstance(message, dict):
        raise Refused(400, "Each message is an object with role and content.")
    blocks = _blocks(message.get("content"))
    yield from (_as_tool_message(block) for block in blocks if block.get("type") == "tool_result")
    calls = [_as_openai_call(block) for block in blocks if block.get("type") == "tool_use"]
    texts = [block for block in blocks if block.get("type") == "text"]
    _require_known(blocks)
    if texts or calls or not blocks:
        converted: ChatMessage = {"role": message.get("role"), "content": _text_of(texts)}
        if calls:
            converted["tool_calls"] = calls
        yield converted


def _require_known(blocks: Sequence[Mapping[str, Any]]) -> None:
    """Raise Refused (400) if one of a message's blocks has a type that cannot be read here, such as
    a picture."""
    types = {str(block.get("type")) for block in blocks}
    unknown = types - {"text", "tool_use", "tool_result", *_THOUGHTS}
    if unknown:
        raise Refused(400, f"Not supported by this gateway: content of type {min(unknown)}.")


def _as_tool_message(block: Mapping[str, Any]) -> ChatMessage:
    """Convert a block `tool_result` to a message in OpenAI's form. Raises Refused (400) if the
    result is not text."""
    content = _text_of(block.get("content") or "")
    call_id = str(block.get("tool_use_id", ""))
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _blocks(content: Any) -> list[Mapping[str, Any]]:
    """Return the blocks of a content; a plain text is one block. Raises Refused (400) for anything
    else."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refused(400, "content is a text or a list of blocks.")
    return content


def _text_of(content: Any) -> str:
    """Return the text of a content. Raises Refused (400) if one of its blocks is not text."""
    texts = [block.get("text") for block in _blocks(content)]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(400, "Only text can be read here.")
    return "".join(str(text) for text in texts)


def _as_openai_call(block: Mapping[str, Any]) -> JsonObject:
    """Convert a block `tool_use` to a call in OpenAI's form."""
    function = {
        "name": str(block.get("name", "")),
        "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
    }
    return {"type": "function", "id": str(block.get("id", "")), "function": function}


def reply(question: Question, answer: Answer) -> JsonObject:
    """Return the answer as Anthropic's message object, for a reply that is not streamed."""
    return _message(question, answer) | {
        "content": _content(answer),
        "stop_reason": _FINISH[answer.finish],
        "usage": _token_counts(answer),
    }


def _message(question: Question, answer: Answer) -> JsonObject:
    """Return Anthropic's message object as a stream begins with it: without any content yet, so
    that the usage counts the prompt's tokens alone."""
    return {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": question.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _token_counts(answer) | {"output_tokens": 0},
    }


def _token_counts(answer: Answer) -> JsonObject:
    """Return Anthropic's `usage` object; nothing is cached here."""
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _content(answer: Answer) -> list[JsonObject]:
    """Return the answer as Anthropic's content blocks: its text, then one `tool_use` block per
    call. An empty answer becomes one empty text block."""
    blocks: list[JsonObject] = []
    if answer.text or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.tool_calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
        )
    return blocks


def events(question: Question, answer: Answer) -> list[str]:
    """Return the answer as server-sent events, each of which has a name (`event: ...`).

    A stream consists of the start of the message, three events for each block, and its end.
    """
    payloads: list[JsonObject] = [
        {"type": "message_start", "message": _message(question, answer)},
    ]
    for index, block in enumerate(_content(answer)):
        block_at_start, delta = _start_and_delta(block)
        payloads += [
            {"type": "content_block_start", "index": index, "content_block": block_at_start},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ending = {"stop_reason": _FINISH[answer.finish], "stop_sequence": None}
    payloads += [
        {"type": "message_delta", "delta": ending, "usage": _token_counts(answer)},
        {"type": "message_stop"},
    ]
    return [f"event: {payload['type']}\ndata: {json.dumps(payload)}\n\n" for payload in payloads]


def _start_and_delta(block: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Split a block of an answer for a stream: return (the block while it is still empty, the delta
    that fills it)."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
    arguments_delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    return block | {"input": {}}, arguments_delta
