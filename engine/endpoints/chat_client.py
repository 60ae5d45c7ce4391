"""One turn asked of a model behind a URL: `/chat/completions` as OpenAI defines it.

A request that fails for now (no connection, 429, 5xx) is sent again, after as long as `Retry-After`
says or else after pauses that double. No redirect is followed: nothing is asked but the URL that
the owner wrote into config.toml.
"""

import json
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
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before another attempt
CONNECT_S = 10.0
MOST_BYTES = 16_000_000  # of a reply
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)  # of other statuses a second try changes nothing
# Parameters without which a model can be asked all the same; some providers refuse them by name.
OPTIONAL = ("temperature", "top_p", "seed", "stop", "top_k", "min_p")
_SHOWN = 300  # characters of a server's message
_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")


class Cancelled(Exception):
    """The run was asked to stop while a request was waiting."""


class EndpointDown(Exception):
    """The endpoint did not answer, however often it was asked; the text says why."""


@dataclass
class Refused(Exception):
    """The endpoint will not answer this request, however often it is sent.

    Attributes:
        status: of HTTP; 200 for a reply that is no answer.
        text: what the server says.
    """

    status: int
    text: str

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.text}"

    @property
    def is_about_all(self) -> bool:
        """Whether every other request would be refused too: the key, the model or the path is
        wrong."""
        return self.status in (401, 402, 403, 404, 405) or 300 <= self.status < 400

    @property
    def is_too_long(self) -> bool:
        """Whether the conversation is longer than the model reads."""
        text = self.text.lower()
        return "context_length" in text or "context length" in text or "too long" in text


@dataclass(frozen=True)
class Turn:
    """What came back.

    Attributes:
        message: role, content, and where there are any reasoning_content and tool_calls.
        invalid_calls: why a tool call in it is invalid, one text each.
        is_cut: the answer was cut at its longest.
        tokens_in, tokens_out: as the server counts them; None where it does not say.
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
    """Asks one endpoint, from any number of threads.

    Attributes:
        left_out: parameters that the server refused, and that requests go without since.
    """

    def __init__(self, endpoint: EndpointEntry, key: str, stop: threading.Event) -> None:
        """Ask `endpoint` with the bearer token `key`, "" for none; `stop` ends pauses."""
        self.endpoint = endpoint
        self.left_out: list[str] = []
        self._limit_name = "max_tokens"  # newer models of OpenAI have another name for it
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
        """The model's next turn of a conversation.

        Args:
            messages: of the conversation so far.
            tools: what it may call.
            options: `max_tokens`, and any of `OPTIONAL`.

        Raises Refused, EndpointDown or Cancelled.
        """
        body: JsonObject = {
            "model": self.endpoint.model,
            "messages": [to_openai(message) for message in messages],
        }
        if tools:
            body["tools"] = list(tools)
        began = time.monotonic()
        reply, retries = self._answered(body, options)
        return _turn_in(reply, tools, time.monotonic() - began, retries)

    def _answered(self, body: JsonObject, options: JsonObject) -> tuple[Any, int]:
        """Send a request until it is answered: (the decoded reply, further attempts)."""
        problem, attempt = "", 0
        while attempt < ATTEMPTS:
            if self._stop.is_set():
                raise Cancelled
            asked_without = list(self.left_out), self._limit_name
            try:
                return self._send(body | self._accepted(options)), attempt
            except _TryAgain as failed:
                problem, attempt = str(failed), attempt + 1
                pause = failed.pause_s
                if pause is None:
                    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
                if attempt < ATTEMPTS and self._stop.wait(pause):
                    raise Cancelled from None
            except Refused as refusal:
                if not self._adapted(refusal, options, asked_without):
                    raise
        raise EndpointDown(f"{self.endpoint} did not answer {ATTEMPTS} times: {problem}")

    def _accepted(self, options: JsonObject) -> JsonObject:
        """The options by the names that this server takes, without those that it refuses."""
        with self._lock:
            taken = {
                name: value
                for name, value in options.items()
                if name != "max_tokens" and name not in self.left_out
            }
            return {self._limit_name: options["max_tokens"], **taken}

    def _adapted(self, refusal: Refused, options: JsonObject, asked: tuple[list[str], str]) -> bool:
        """Whether the request may be sent again in another form: the server refused a parameter by
        name. `asked` says how it was sent (parameters left out, name of the limit)."""
        if refusal.status not in (400, 422):
            return False
        text = refusal.text
        with self._lock:
            if (self.left_out, self._limit_name) != asked:  # another thread has found out already
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
        """Send one request and decode the reply. Raises _TryAgain or Refused."""
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
    """A request was not answered, but may be when it is sent again.

    Attributes:
        text: why it was not.
        pause_s: how long the server asks to wait; None where it does not say.
    """

    text: str
    pause_s: float | None = None

    def __str__(self) -> str:
        return self.text


def _read(response: httpx.Response, deadline: float) -> bytes:
    """The body of a response. Raises _TryAgain where it is not there by the deadline, or is too
    large."""
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
    """The seconds to wait that a response names, at most `LONGEST_PAUSE_S`; None without any."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(LONGEST_PAUSE_S, max(0.0, seconds)) if seconds == seconds else None


def to_openai(message: ChatMessage) -> ChatMessage:
    """A message in OpenAI's form: arguments of calls as JSON text, nothing that it does not
    know."""
    body = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    calls = message.get("tool_calls") or []
    if calls:
        body["tool_calls"] = [_call_to_openai(call) for call in calls]
        body["content"] = body.get("content") or None  # some servers refuse an empty text here
    else:
        body.setdefault("content", "")
    return body


def _call_to_openai(call: JsonObject) -> JsonObject:
    """A tool call with its arguments as JSON text."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(call.get("id") or "call_1"),
        "type": "function",
        "function": {"name": str(function.get("name")), "arguments": text},
    }


def _turn_in(reply: Any, tools: Sequence[ToolSchema], seconds: float, retries: int) -> Turn:
    """Read a reply. Raises Refused where it holds no answer."""
    try:
        choice = reply["choices"][0]
        given = choice["message"]
        message: ChatMessage = {"role": "assistant", "content": _text_in(given.get("content"))}
        calls, faults = _calls_in(given.get("tool_calls") or [], tools)
    except (LookupError, TypeError, AttributeError) as error:
        raise Refused(200, f"its reply holds no answer: {str(reply)[:_SHOWN]}") from error
    thought = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    elif faults:  # where the environment sees them
        message["content"] += json.dumps(given["tool_calls"], ensure_ascii=False)
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
    """A number of tokens; None for anything that is none."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None


def _text_in(content: Any) -> str:
    """The text of a message, which may come in parts; "" for none."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return content if isinstance(content, str) else ""


def _calls_in(
    calls: Sequence[JsonObject], tools: Sequence[ToolSchema]
) -> tuple[list[JsonObject], list[str]]:
    """The tool calls as this project keeps them, with arguments as objects, and why any of them is
    invalid. One that cannot be read leaves no calls, as in replies of models that run here."""
    kept: list[JsonObject] = []
    faults: list[str] = []
    unreadable = False
    for number, call in enumerate(calls, start=1):
        name, text = str(call["function"]["name"]), call["function"].get("arguments") or "{}"
        arguments = _object_in(text)
        if arguments is None:
            unreadable = True
            faults.append(f"the arguments of {name[:60]} are no JSON object: {str(text)[:120]}")
            continue
        if fault := fault_of(ParsedCall(name, arguments), tools):
            faults.append(fault)
        function = {"name": name, "arguments": arguments}
        call_id = str(call.get("id") or f"call_{number}")
        kept.append({"id": call_id, "type": "function", "function": function})
    return ([] if unreadable else kept), faults


def _object_in(text: Any) -> JsonObject | None:
    """The JSON object that arguments are; None where they are none."""
    if isinstance(text, dict):
        return text
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
