"""Reads an answer of a deployment while it is sampled: the client side of `openai_server.py`.

A slow model has not failed. As long as tokens come, reading goes on to the caller's deadline. The
answer so far can then be continued: the ids of its tokens are kept, so nothing is tokenised twice.
"""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.core.files import JsonObject, read_json
from engine.home.run_dir import DeployDir
from engine.machine.processes.deployments import Json, Unreachable
from engine.serving.chat_request import Heard, Listener

_CONNECT_S = 5.0
_MOST_LINE = 1 << 20  # bytes of a line, or of an error's text
_SILENCE_S = 30.0  # a process that writes no line for so long counts as stuck, however busy it is
_DATA, _COMMENT, _END = "data: ", ":", "[DONE]"
# What reading a stream can raise. ValueError: a line is no event; RecursionError: it is nested too
# deeply.
_READ_ERRORS = (OSError, ValueError, RecursionError, http.client.HTTPException)


class RefusedByServer(Exception):
    """The deployment answered with an error: its HTTP `status` and `message`."""

    def __init__(self, status: int, message: str) -> None:
        """Keep the HTTP status and the message with which the deployment refused a request."""
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Answer:
    """One answer, as far as it has come. `finish_reason` is "" while it is not done.

    Attributes:
        token_ids: sampled in this call, the end token included.
        is_waiting: the model has not begun with this answer yet, because it is busy with others.
        has_stalled: reading ended because no token came for too long.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[JsonObject] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    finish_reason: str = ""
    is_waiting: bool = True
    has_stalled: bool = False


@dataclass(frozen=True)
class Limits:
    """When to stop reading although the answer is not done.

    Attributes:
        deadline: a time on the monotonic clock.
        stall_s: seconds without a token, counted once the model has begun with this answer.
    """

    deadline: float
    stall_s: float


def sample(
    folder: DeployDir, body: Json, limits: Limits, answer: Answer, listener: Listener
) -> None:
    """Ask a deployment for the chat completion `body`, and add to `answer` what it sends.

    Returns when the answer is done, or when `limits` end it; the deployment then stops sampling.
    `listener` is called with each piece that comes; an error that it raises ends the call.

    Raises RefusedByServer if the deployment answers with an error, Unreachable if its process is
    not ready or ends meanwhile. `answer` then holds what came before.
    """
    port, key = _port_and_key(folder)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_CONNECT_S)
    with contextlib.closing(connection):
        try:
            _request_stream(connection, key, body)
            # If the reply says "Connection: close", `connection.sock` becomes None while the reply
            # is still being read. So the socket's method is kept here.
            set_timeout = connection.sock.settimeout
            # The time in which the reply must begin.
            set_timeout(max(_CONNECT_S, limits.deadline - time.monotonic()))
            response = _accepted_response(connection)
            for line in _lines(response, set_timeout, limits, answer):
                _add_line(line, answer, str(body["model"]), listener)
        except _READ_ERRORS as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= limits.deadline:
                return  # the deployment has not even begun to reply
            raise _unreachable(error) from error
    _check_end(answer, limits)


def _check_end(answer: Answer, limits: Limits) -> None:
    """Raise Unreachable if the stream has ended although the answer is neither done nor ended by
    `limits`."""
    is_cut = answer.has_stalled or time.monotonic() >= limits.deadline
    if not answer.finish_reason and not is_cut:
        raise Unreachable("the answer ended in its middle")


def _port_and_key(folder: DeployDir) -> tuple[int, str]:
    """Read (the port on which the deployment listens, the key that it asks for) from the files in
    its folder. Raises Unreachable if the deployment is not ready."""
    try:
        return int(read_json(folder.ready)["port"]), folder.key.read_text().strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> Unreachable:
    """Make the error for a deployment that cannot be read from, because of `error`."""
    return Unreachable(f"{type(error).__name__}: {error}")


def _accepted_response(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """Wait until the server replies on `connection`, and return its reply before any line is read.
    Raises RefusedByServer if the reply is an error."""
    response = connection.getresponse()
    if response.status != 200:
        raise RefusedByServer(response.status, _error_text(response.read(_MOST_LINE)))
    return response


def _request_stream(connection: http.client.HTTPConnection, key: str, body: Json) -> None:
    """Send the request for the chat completion `body`, as a stream with token ids. `key` is the key
    of the deployment. The response can then be read from `connection`."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    data = json.dumps(body | streamed).encode()
    connection.request("POST", "/v1/chat/completions", data, headers)


def _lines(
    response: http.client.HTTPResponse,
    set_timeout: Callable[[float], None],
    limits: Limits,
    answer: Answer,
) -> Iterator[str]:
    """Yield the lines of a stream of server-sent events until the stream ends or `limits` end it.

    Sets `answer.has_stalled` if too much time passed without a token. `set_timeout` sets for how
    many seconds reading from the connection may wait.
    """
    last_token = _LastToken(answer, at=time.monotonic())
    while True:
        now = time.monotonic()
        # This time and those below are on the monotonic clock.
        stalls_at = last_token.refreshed_at(now) + limits.stall_s
        answer.has_stalled = now >= stalls_at
        if answer.has_stalled or now >= limits.deadline:
            return
        silence_ends_at = stalls_at
        if answer.is_waiting:
            # While the model is busy with other answers, its process sends a comment every second.
            silence_ends_at = now + max(limits.stall_s, _SILENCE_S)
        set_timeout(min(silence_ends_at, limits.deadline) - now)
        try:
            line = _next_line(response)
        except TimeoutError:  # nothing came, not even a comment
            answer.has_stalled = silence_ends_at < limits.deadline  # else the call's time was up
            return
        if line is None:  # the end of the stream
            return
        if line:  # an empty one ends an event
            yield line


@dataclass
class _LastToken:
    """The time at which the answer got its last token.

    Attributes:
        at: a time on the monotonic clock.
        count: how many tokens the answer had then.
    """

    answer: Answer
    at: float
    count: int = 0

    def refreshed_at(self, now: float) -> float:
        """Update and return the time from which the wait for a token is counted. It becomes `now`
        if the answer got a token since the last call, and also while the model is busy with others
        (`is_waiting`), because then no token is expected."""
        count = len(self.answer.token_ids)
        if count != self.count or self.answer.is_waiting:
            self.count, self.at = count, now
        return self.at


def _next_line(response: http.client.HTTPResponse) -> str | None:
    """Read the next line of `response`, a stream of events; "" is a line that ends an event.
    Returns None at the end of the stream, which the line "data: [DONE]" marks as well. Raises
    TimeoutError if no line comes, ValueError for one that is too long."""
    data = response.readline(_MOST_LINE)
    if len(data) == _MOST_LINE:
        raise ValueError("a line without end")
    line = data.decode("utf-8", "replace").rstrip("\r\n")
    is_end = not data or line == _DATA + _END
    return None if is_end else line


def _add_line(line: str, answer: Answer, model: str, listener: Listener) -> None:
    """Add a line of the stream to the answer, and tell the listener the new text of `model`. A
    comment, which a waiting deployment sends, adds nothing; the listener gets "".

    Raises ValueError if the line has a form that deployments do not write.
    """
    text = ""
    if line.startswith(_DATA):
        chunk = json.loads(line.removeprefix(_DATA))
        try:
            usage = chunk.get("usage") or {}  # only the last piece has it
            answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
            for choice in chunk.get("choices") or []:  # at most one: one answer was asked for
                text = _add_choice(choice, answer)
            _check_types(answer)
        except (AttributeError, TypeError) as error:  # another machine may write anything
            raise ValueError(f"no event of ours: {line[:80]}") from error
    elif not line.startswith(_COMMENT):
        raise ValueError(f"no event: {line[:80]}")
    listener(Heard(model, text, len(answer.token_ids), answer.is_waiting))


def _check_types(answer: Answer) -> None:
    """Raise TypeError if a part of the answer has another type than it must have."""
    is_sound = isinstance(answer.prompt_tokens, int | None) and isinstance(
        answer.finish_reason, str
    )
    if not is_sound or not all(isinstance(token, int) for token in answer.token_ids[-64:]):
        raise TypeError("a part of the answer has a wrong type")


def _add_choice(choice: JsonObject, answer: Answer) -> str:
    """Add one piece of a streamed answer to `answer`, and return the text in it. `choice` is the
    piece in the form of OpenAI's chat.completion.chunk; each of its parts may be missing."""
    delta = choice.get("delta") or {}
    text = delta.get("content") or ""
    answer.content += text
    answer.reasoning += delta.get("reasoning_content") or ""
    answer.tool_calls += [_without_index(call) for call in delta.get("tool_calls") or []]
    answer.token_ids += choice.get("token_ids") or []
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    # The server sends the first piece, which has the role, at once. All others come after the model
    # has begun.
    is_first_piece = "role" in delta
    answer.is_waiting = answer.is_waiting and is_first_piece
    return text


def _without_index(call: JsonObject) -> JsonObject:
    """Return a tool call without its key `index`, which it has in a stream but not in a whole
    answer."""
    return {name: value for name, value in call.items() if name != "index"}


def _error_text(data: bytes) -> str:
    """Return the message of an error reply, which is {"error": {"message": ...}} or {"error": ...};
    "" if it has none."""
    try:
        error = json.loads(data).get("error")
    except (ValueError, RecursionError, AttributeError):  # not JSON; no object
        return ""
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
