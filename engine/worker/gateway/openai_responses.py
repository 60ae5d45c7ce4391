"""The route `/v1/responses` for programs, without what a server would have to remember: every
request contains its whole conversation."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from engine.worker.gateway.asked import (
    Answer,
    Question,
    checked_size,
    conversation,
    fields_of,
    token_limit,
)
from engine.worker.gateway.chat_request import Refused
from envs.json_types import ChatMessage, JsonObject, ToolSchema

_ACTED_ON = "model input instructions tools tool_choice max_output_tokens stream text".split()
_DECIDED_BY_THE_RUN = (
    "temperature top_p user store metadata service_tier parallel_tool_calls prompt_cache_key "
    "prompt_cache_retention safety_identifier reasoning include truncation top_logprobs "
    "client_metadata stream_options"
).split()


def read(body: Any) -> Question:
    """Read what a program asks from the decoded JSON body of its request: the conversation, the
    tools that may be called, and the limits of the answer.

    Raises Refused (400) for a field that is unknown or wrong, or Refused (413) for a prompt that is
    too large.
    """
    fields = fields_of(body, _ACTED_ON, _DECIDED_BY_THE_RUN)
    _require_plain_text(fields.get("text", {}))
    tools = _offered_tools(fields.get("tools", []), fields.get("tool_choice", "auto"))
    messages = _as_messages(fields.get("input"))
    if fields.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(fields["instructions"])})
    return checked_size(
        Question(
            model=str(fields.get("model", "")),
            messages=conversation(messages),
            tools=tools,
            max_tokens=token_limit(fields.get("max_output_tokens"), "max_output_tokens"),
            stream=bool(fields.get("stream")),
        )
    )


def _require_plain_text(form: Any) -> None:
    """Check the field `text` of a request. Raises Refused (400) if it asks for an answer in another
    form than plain text."""
    kind = form.get("format", {"type": "text"}) if isinstance(form, dict) else {}
    if not isinstance(kind, dict) or kind.get("type") != "text":
        raise Refused(400, "text.format must be text: nothing else is enforced here.")


def _offered_tools(tools: Any, choice: Any) -> list[ToolSchema]:
    """Return the tools that the model may call, in the form of chat completions; [] if the
    request's tool choice is "none". Raises Refused (400) for a choice other than "auto" and "none",
    and for a tool that is no function."""
    if choice not in ("auto", "none"):
        raise Refused(400, "tool_choice must be auto or none: no call can be enforced here.")
    if not isinstance(tools, list):
        raise Refused(400, "tools must be a list of objects.")
    return [_as_chat_tool(tool) for tool in tools] if choice == "auto" else []


def _as_chat_tool(tool: Any) -> ToolSchema:
    """Convert one tool of a Responses request to the form of chat completions: {"type": "function",
    "function": {name, description, parameters}}. Raises Refused (400) if it is no function, such as
    a web search that the vendor runs itself."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Refused(400, "Only tools of type function can be offered here.")
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _as_messages(request_input: Any) -> list[ChatMessage]:
    """Convert the field `input` of a request, a text or a list of items, to messages. Function
    calls that follow one another, or an assistant's text, become one message. Raises Refused (400)
    for an item of another kind."""
    if isinstance(request_input, str):
        return [{"role": "user", "content": request_input}]
    if not isinstance(request_input, list):
        raise Refused(400, "input must be a text or a list of items.")
    messages: list[ChatMessage] = []
    for item in request_input:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[ChatMessage], item: Any) -> None:
    """Append an item of a request to the messages so far. A function call joins the last message if
    that is the assistant's. Raises Refused (400) for an item of an unknown kind."""
    if not isinstance(item, dict):
        raise Refused(400, "Each item of input is an object.")
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(_as_chat_call(item))
    elif kind == "function_call_output":
        call_id = str(item.get("call_id", ""))
        output = item.get("output", "")
        messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif kind != "reasoning":  # earlier thoughts, which programs send back, are dropped
        raise Refused(400, f"Not supported by this gateway: an item of type {kind}.")


def _as_chat_call(item: Mapping[str, Any]) -> JsonObject:
    """Convert an item `function_call` to a call in the form of chat completions."""
    function = {"name": str(item.get("name", "")), "arguments": item.get("arguments") or "{}"}
    return {"type": "function", "id": str(item.get("call_id", "")), "function": function}


def reply(question: Question, answer: Answer) -> JsonObject:
    """Return the answer as OpenAI's response object, for a reply that is not streamed."""
    return _empty_response(question) | _final_fields(answer) | {"output": _output_items(answer)}


def _empty_response(question: Question) -> JsonObject:
    """Return OpenAI's response object as a stream begins with it: without any output yet."""
    return {
        "id": f"resp_{uuid.uuid4().hex[:24]}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": question.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _final_fields(answer: Answer) -> JsonObject:
    """Return the fields of OpenAI's response object that are known once the answer has ended: the
    status, why it is incomplete if a limit cut it, and the numbers of tokens."""
    is_cut = answer.finish == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _output_items(answer: Answer) -> list[JsonObject]:
    """Return the answer as OpenAI's output items: a message with its text, then one `function_call`
    per call. An empty answer becomes one message with an empty text."""
    items: list[JsonObject] = []
    if answer.text or not answer.tool_calls:
        items.append(
            {
                "type": "message",
                "id": f"msg_{uuid.uuid4().hex[:24]}",
                "role": "assistant",
                "status": "completed",
                "content": [_text_part(answer.text)],
            }
        )
    for call in answer.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex[:24]}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


def _text_part(text: str) -> JsonObject:
    """Return a text as a content part of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def events(question: Question, answer: Answer) -> list[str]:
    """Return the answer as server-sent events, each of which has a name (`event: ...`) and a
    number.

    A stream consists of the created response, several events for each item, and the ended response.
    """
    response = _empty_response(question)
    items = _output_items(answer)
    payloads: list[JsonObject] = [{"type": "response.created", "response": response}]
    for index, item in enumerate(items):
        payloads += _item_events(index, item)
    ended = response | _final_fields(answer) | {"output": items}
    kind = "response.incomplete" if answer.finish == "length" else "response.completed"
    payloads.append({"type": kind, "response": ended})
    return [
        f"event: {payload['type']}\ndata: {json.dumps(payload | {'sequence_number': number})}\n\n"
        for number, payload in enumerate(payloads)
    ]


def _text_events(item: JsonObject, position: JsonObject) -> list[JsonObject]:
    """Return the events that write the text of a message item. `position` holds the keys that tell
    in each event which item it belongs to."""
    (part,) = item["content"]
    inside = position | {"content_index": 0}
    text = part["text"]
    delta = {"delta": text, "logprobs": []}
    return [
        {"type": "response.content_part.added", **inside, "part": _text_part("")},
        {"type": "response.output_text.delta", **inside, **delta},
        {"type": "response.output_text.done", **inside, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **inside, "part": part},
    ]


def _argument_events(item: JsonObject, position: JsonObject) -> list[JsonObject]:
    """Return the events that write the arguments of a call. `position` holds the keys that tell in
    each event which item it belongs to."""
    arguments = item["arguments"]
    done = {"name": item["name"], "arguments": arguments}
    return [
        {"type": "response.function_call_arguments.delta", **position, "delta": arguments},
        {"type": "response.function_call_arguments.done", **position, **done},
    ]


def _item_events(index: int, item: JsonObject) -> list[JsonObject]:
    """Return the stream's events for one output item, number `index` of the answer: it is added
    without content, then its text or arguments follow, then the whole item is repeated as done."""
    position: JsonObject = {"item_id": item["id"], "output_index": index}
    item_at_start = item | {"status": "in_progress"}
    if item["type"] == "message":
        item_at_start["content"] = []
        content_events = _text_events(item, position)
    else:
        item_at_start["arguments"] = ""
        content_events = _argument_events(item, position)
    return [
        {"type": "response.output_item.added", "output_index": index, "item": item_at_start},
        *content_events,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]
