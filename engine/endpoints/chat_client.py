"""Asks a model behind a URL for one turn of a conversation: `/chat/completions` as OpenAI defines
it.

A request that fails for a passing reason (no connection, 429, 5xx) is sent again, after the time
that `Retry-After` asks for, or else after pauses that double. No redirect is followed, so nothing
is asked but the URL that the owner wrote into config.toml.
"""

import json
import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from engine.models.dialects.arguments import fault_of
from engine.models.dialects.reading import ParsedCall
from engine.records.run_config import EndpointEntry
from envs.json_types import ChatMessage, JsonObject, ToolSchema

ATTEMPTS = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # seconds of the pauses between attempts
CONNECT_S = 10.0
MOST_BYTES = 16_000_000  # a longer reply is not read
# HTTP statuses after which the request is sent again; with others a second try changes nothing.
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
# Parameters that a request can do without. Some providers refuse them by name.
OPTIONAL = ("temperature", "top_p", "seed", "stop", "top_k", "min_p")
_SHOWN = 300  # characters that are shown of a server's message
_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")


class Cancelled(Exception):
    """The run was asked to stop while a request was waiting."""


class EndpointDown(Exception):
    """The endpoint did not answer after all attempts; the text says why."""


@dataclass
class Refused(Exception):
    """The endpoint will not answer this request, however often it is sent.

    Attributes:
        status: of HTTP; 200 if the reply holds no answer.
        text: the server's message.
    """

    status: int
    text: str

    def __str__(self) -> str:
        """Return the status and the server's message, such as "HTTP 400: no such model"."""
        return f"HTTP {self.status}: {self.text}"

    @property
    def is_about_all(self) -> bool:
        """Whether every other request would be refused too, because the key, the model or the path
        is wrong."""
        is_redirect = 300 <= self.status < 400  # the client follows none
        return is_redirect or self.status in (401, 402, 403, 404, 405)

    @property
    def is_too_long(self) -> bool:
        """Whether the server refused because the conversation is longer than the model can read."""
        text = self.text.lower()
        return "context_length" in text or "context length" in text or "too long" in text


@dataclass(frozen=True)
class Turn:
    """The model's answer to one request.

    Attributes:
        message: role, content, and if there are any reasoning_content and tool_calls.
        invalid_calls: for each invalid tool call the reason why it is invalid.
        is_cut: whether the answer was cut because it reached the limit of tokens.
        tokens_in, tokens_out: as the server counts them; None if it does not say.
        seconds: from the first attempt to the answer.
        retries: attempts beyond the first.
    """

    message: ChatMessage
    invalid_calls: list[str] = field(default_factory=list)
    is_cut: bool = False
    tokens_in: int | None = None
    tokens_out: int | None = None
    seconds: float = 0.0
    retries: int = 0


class ChatClient:
    """Asks one endpoint. May be used from any number of threads.

    Attributes:
        left_out: parameters that the server has refused, and that later requests leave out.
    """

    def __init__(self, endpoint: EndpointEntry, key: str, stop: threading.Event) -> None:
        """Prepare to ask `endpoint` with the bearer token `key` ("" for none). Setting `stop` ends
        pauses between attempts."""
        self.endpoint = endpoint
        self.left_out: list[str] = []
        self._limit_name = "max_tokens"  # newer models of OpenAI use "max_completion_tokens"
        self._stop = stop
        self._lock = threading.Lock()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(endpoint.timeout_s, connect=min(CONNECT_S, endpoint.timeout_s)),
            limits=httpx.Limits(max_connections=endpoint.max_concurrency),
            follow_redirects=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], options: JsonObject
    ) -> Turn:
        """Ask for the model's next turn of a conversation.

        Args:
            messages: the conversation so far.
            tools: the tools that the model may call.
            options: `max_tokens`, and any of `OPTIONAL`.

        Raises Refused if the endpoint refuses the request or its reply holds no answer,
        EndpointDown if it did not answer after all attempts, Cancelled if the run was asked to
        stop.
        """
        body: JsonObject = {
            "model": self.endpoint.model,
            "messages": [to_openai(message) for message in messages],
        }
        if tools:
            body["tools"] = list(tools)
        began = time.monotonic()
        reply, retries = self._send_until_answered(body, options)
        return _turn_in(reply, tools, time.monotonic() - began, retries)

    def _send_until_answered(self, body: JsonObject, options: JsonObject) -> tuple[Any, int]:
        """Send a request until it is answered. Returns (the decoded reply, the number of further
        attempts).

        Raises Refused, EndpointDown or Cancelled under the conditions of `ask`.
        """
        problem, attempt = "", 0
        while attempt < ATTEMPTS:
            if self._stop.is_set():
                raise Cancelled
            # The form of this request: which parameters are left out, and how the token limit is
            # named. Another thread may change the form while this one waits.
            form = list(self.left_out), self._limit_name
            try:
                return self._send(body | self._accepted_options(options)), attempt
            except _TryAgain as failure:
                problem, attempt = str(failure), attempt + 1
                pause = failure.pause_s
                if pause is None:
                    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
                if attempt < ATTEMPTS and self._stop.wait(pause):
                    raise Cancelled from None
            except Refused as refusal:
                if not self._adapt_form(refusal, options, form):
                    raise
        raise EndpointDown(f"{self.endpoint} did not answer {ATTEMPTS} times: {problem}")

    def _accepted_options(self, options: JsonObject) -> JsonObject:
        """Return the options under the names that this server takes, without those that it has
        refused."""
        with self._lock:
            accepted = {
                name: value
                for name, value in options.items()
                if name != "max_tokens" and name not in self.left_out
            }
            return {self._limit_name: options["max_tokens"], **accepted}

    def _adapt_form(
        self, refusal: Refused, options: JsonObject, sent_form: tuple[list[str], str]
    ) -> bool:
        """Change the form of later requests if the server refused a parameter by name. Returns
        whether the request may be sent again.

        Args:
            options: the parameters of the request.
            sent_form: how it was sent: (parameters left out, name of the token limit).
        """
        if refusal.status not in (400, 422):
            return False
        text = refusal.text
        with self._lock:
            present_form = self.left_out, self._limit_name
            if present_form != sent_form:  # another thread has changed it
                return True
            if "max_completion_tokens" in text and self._limit_name == "max_tokens":
                self._limit_name = "max_completion_tokens"
                return True
            for name in OPTIONAL:
                is_named = re.search(rf"['\"`]{name}['\"`]", text) is not None
                if is_named and name in options and name not in self.left_out:
                    self.left_out.append(name)
                    return True
        return False

    def _send(self, body: JsonObject) -> Any:
        """Send one request and decode the reply. Raises _TryAgain if it failed for a passing
        reason, Refused if the server refused it."""
        deadline = time.monotonic() + self.endpoint.timeout_s
        url = f"{self.endpoint.url}/chat/completions"
        try:
            with self._client.stream("POST", url, json=body) as response:
                data = _read(response, deadline)
        except httpx.HTTPError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}"[:_SHOWN]) from error
        status = response.status_code
        text = data.decode("utf-8", "replace")
        if status in RETRIED:
            raise _TryAgain(f"HTTP {status}: {text[:_SHOWN]}", _retry_after(response))
        if status != 200:
            raise Refused(status, text[:_SHOWN])
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _TryAgain(f"its reply is no JSON: {text[:_SHOWN]!r}") from error


@dataclass
class _TryAgain(Exception):
    """A request was not answered, but may be if it is sent again.

    Attributes:
        text: why it was not answered.
        pause_s: how long the server asks to wait; None if it does not say.
    """

    text: str
    pause_s: float | None = None

    def __str__(self) -> str:
        """Return why the request was not answered."""
        return self.text


def _read(response: httpx.Response, deadline: float) -> bytes:
    """Read the body of a response. Raises _TryAgain if it is not complete by the deadline, or is
    larger than MOST_BYTES."""
    parts: list[bytes] = []
    size = 0
    for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise _TryAgain(f"its reply is larger than {MOST_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise _TryAgain("its reply was not complete in time")
    return b"".join(parts)


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that a response asks to wait (a number or a date), at most
    `LONGEST_PAUSE_S`; None if it does not say."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    if math.isnan(seconds):  # float() reads "nan" too
        return None
    return min(LONGEST_PAUSE_S, max(0.0, seconds))


def to_openai(message: ChatMessage) -> ChatMessage:
    """Convert a message to OpenAI's form: arguments of tool calls as JSON text, and only the fields
    that OpenAI knows."""
    body = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    calls = message.get("tool_calls") or []
    if calls:
        body["tool_calls"] = [_call_to_openai(call) for call in calls]
        body["content"] = body.get("content") or None  # some servers refuse an empty text here
    else:
        body.setdefault("content", "")
    return body


def _call_to_openai(call: JsonObject) -> JsonObject:
    """Convert a tool call to OpenAI's form, with its arguments as JSON text."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(call.get("id") or "call_1"),
        "type": "function",
        "function": {"name": str(function.get("name")), "arguments": text},
    }


def _turn_in(reply: Any, tools: Sequence[ToolSchema], seconds: float, retries: int) -> Turn:
    """Read the model's turn from a decoded reply, which came after `seconds` and `retries` further
    attempts. Tool calls are checked against `tools`. Raises Refused if the reply holds no
    answer."""
    try:
        choice = reply["choices"][0]
        answer = choice["message"]
        message: ChatMessage = {"role": "assistant", "content": _text_in(answer.get("content"))}
        calls, faults = _calls_in(answer.get("tool_calls") or [], tools)
    except (LookupError, TypeError, AttributeError) as error:
        raise Refused(200, f"its reply holds no answer: {str(reply)[:_SHOWN]}") from error
    thought = answer.get("reasoning_content") or answer.get("reasoning")
    if isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    elif faults:  # calls that cannot be read go into the text, so that the environment sees them
        message["content"] += json.dumps(answer["tool_calls"], ensure_ascii=False)
    usage = reply.get("usage") or {}
    return Turn(
        message,
        faults,
        is_cut=choice.get("finish_reason") == "length",
        tokens_in=_count(usage.get("prompt_tokens")),
        tokens_out=_count(usage.get("completion_tokens")),
        seconds=seconds,
        retries=retries,
    )


def _count(value: Any) -> int | None:
    """Return `value`, a server's number of tokens, if it is an integer of at least 0, else None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None


def _text_in(content: Any) -> str:
    """Return the text of a message's content, which may come in parts; "" if there is none."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return content if isinstance(content, str) else ""


def _calls_in(
    calls: Sequence[JsonObject], tools: Sequence[ToolSchema]
) -> tuple[list[JsonObject], list[str]]:
    """Convert tool calls to this project's form, with arguments as objects. Returns (the calls, the
    reasons why any of them are invalid). If one cannot be read, no calls are returned, as for
    replies of models that run here."""
    readable_calls: list[JsonObject] = []
    faults: list[str] = []
    has_unreadable = False
    for number, call in enumerate(calls, start=1):
        name, text = str(call["function"]["name"]), call["function"].get("arguments") or "{}"
        arguments = _object_in(text)
        if arguments is None:
            has_unreadable = True
            faults.append(f"the arguments of {name[:60]} are no JSON object: {str(text)[:120]}")
            continue
        fault = fault_of(ParsedCall(name, arguments), tools)  # None if the call is valid
        if fault:
            faults.append(fault)
        function = {"name": name, "arguments": arguments}
        call_id = str(call.get("id") or f"call_{number}")
        readable_calls.append({"id": call_id, "type": "function", "function": function})
    if has_unreadable:
        return [], faults
    return readable_calls, faults


def _object_in(text: Any) -> JsonObject | None:
    """Return the arguments of a tool call, which servers send as JSON text, as an object. Returns
    None if they are no JSON object."""
    if isinstance(text, dict):
        return text
    try:
        value = json.loads(text)
    # TypeError: `text` is no text; ValueError: not JSON; RecursionError: nested too deeply.
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
