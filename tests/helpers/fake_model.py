"""A model API on loopback that plays a script, so that real agent programs run without a login.

It speaks what Claude Code asks for (`POST /v1/messages`) and what Codex asks for
(`POST /v1/responses`), both as server-sent events. The script is a generator: it yields the next
tool call and is sent what the agent showed the model as that call's result. When it returns, the
model says so and the agent ends.
"""

import json
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SAID_AT_THE_END = "The loop is complete."


@dataclass(frozen=True)
class Call:
    """A tool call of the model: the server's name is empty for a tool of the agent itself."""

    tool: str
    arguments: dict[str, Any]
    server: str = "honesmith"


@dataclass(frozen=True)
class Shown:
    """What the model was shown as the result of a call.

    Attributes:
        offered: names of the tools it may call next, those of a server as `server/tool`.
    """

    call: Call
    text: str
    failed: bool
    offered: frozenset[str]


Script = Generator[Call, Shown, None]


@dataclass
class FakeModel:
    """The state of one played script.

    Attributes:
        url: where it listens, without a path.
        requests: every body that the agent's main conversation has sent, in order.
        shown: every result the model has seen, in order.
        problem: why the script stopped before its end; None while all is well.
    """

    script: Script
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    problem: BaseException | None = None
    ended: bool = False
    _call: Call | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def turn(self, request: dict[str, Any], results: list[tuple[str, str, bool]]) -> Call | None:
        """The model's next call, or None at the end.

        Args:
            results: id, text and failure of every result in the conversation so far. A request
                that is sent again has no new one and gets the same call again.
        """
        with self._lock:
            self.requests.append(request)
            new = [r for r in results if r[0] == self.call_id]
            if self.ended or (self._call is not None and not new):
                return None if self.ended else self._call
            try:
                if self._call is None:
                    self._call = next(self.script)
                else:
                    _, text, failed = new[-1]
                    seen = Shown(self._call, text, failed, frozenset(_offered(request)))
                    self.shown.append(seen)
                    self._call = self.script.send(seen)
            except StopIteration:
                self.ended = True
            except BaseException as problem:  # noqa: BLE001  the test raises it where it is seen
                self.problem, self.ended = problem, True
            return None if self.ended else self._call

    @property
    def call_id(self) -> str:
        return f"call_{len(self.shown)}"


@contextmanager
def fake_model(script: Script) -> Iterator[FakeModel]:
    """A listening model that plays `script`."""
    model = FakeModel(script)

    class Handler(_Handler):
        played = model

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    model.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield model
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    played: FakeModel
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._json({})

    def do_GET(self) -> None:
        self._json({"data": [], "models": []})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        path = self.path.partition("?")[0]
        if path.endswith("/count_tokens"):
            self._json({"input_tokens": 1})
        elif path.endswith("/messages"):
            self._messages(body)
        elif path.endswith("/responses"):
            self._responses(body)
        else:
            self._json({})

    # --- Claude Code -----------------------------------------------------------------------

    def _messages(self, body: dict[str, Any]) -> None:
        # Requests without tools are chores of the agent's own: a title, a summary.
        if not body.get("tools"):
            return self._message(body, {"type": "text", "text": "fine"}, "end_turn")
        call = self.played.turn(body, list(_tool_results(body)))
        if call is None:
            return self._message(body, {"type": "text", "text": SAID_AT_THE_END}, "end_turn")
        name = f"mcp__{call.server}__{call.tool}" if call.server else call.tool
        block = {"type": "tool_use", "id": self.played.call_id, "name": name}
        return self._message(body, block | {"input": call.arguments}, "tool_use")

    def _message(self, body: dict[str, Any], block: dict[str, Any], stop: str) -> None:
        usage = {"input_tokens": 10, "output_tokens": 10}
        whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model")}
        whole |= {"stop_sequence": None, "usage": usage}
        if not body.get("stream"):
            return self._json(whole | {"content": [block], "stop_reason": stop})
        if block["type"] == "text":
            start, delta = {"type": "text", "text": ""}, {"type": "text_delta", **_text(block)}
        else:
            start = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        ended = {"stop_reason": stop, "stop_sequence": None}
        return self._events(
            {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}},
            {"type": "content_block_start", "index": 0, "content_block": start},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ended, "usage": usage},
            {"type": "message_stop"},
        )

    # --- Codex -----------------------------------------------------------------------------

    def _responses(self, body: dict[str, Any]) -> None:
        call = self.played.turn(body, list(_call_outputs(body)))
        if call is None:
            content = [{"type": "output_text", "text": SAID_AT_THE_END}]
            item: dict[str, Any] = {"type": "message", "role": "assistant", "content": content}
        else:
            item = {"type": "function_call", "call_id": self.played.call_id, "name": call.tool}
            item["arguments"] = json.dumps(call.arguments)
            if call.server:
                item["namespace"] = f"mcp__{call.server}"
        usage = {"input_tokens": 10, "input_tokens_details": None, "output_tokens": 10}
        usage |= {"output_tokens_details": None, "total_tokens": 20}
        self._events(
            {"type": "response.created", "response": {"id": "resp_1"}},
            {"type": "response.output_item.done", "item": item},
            {"type": "response.completed", "response": {"id": "resp_1", "usage": usage}},
        )

    # --- both ------------------------------------------------------------------------------

    def _events(self, *events: dict[str, Any]) -> None:
        text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        self._send(text.encode(), "text/event-stream")

    def _json(self, body: dict[str, Any]) -> None:
        self._send(json.dumps(body).encode(), "application/json")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _offered(body: dict[str, Any]) -> Iterator[str]:
    for tool in body.get("tools", []):
        name = str(tool.get("name"))
        server, _, own = name.removeprefix("mcp__").partition("__")
        if tool.get("type") == "namespace":
            space = name.removeprefix("mcp__")
            yield from (f"{space}/{inner.get('name')}" for inner in tool["tools"])
        else:
            yield f"{server}/{own}" if name.startswith("mcp__") else name


def _text(block: dict[str, Any]) -> dict[str, str]:
    return {"text": block["text"]}


def _tool_results(body: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for message in body.get("messages", []):
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part.get("type") == "tool_result":
                text = _plain(part.get("content", ""))
                yield part["tool_use_id"], text, bool(part.get("is_error"))


def _call_outputs(body: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for item in body.get("input", []):
        if item.get("type") == "function_call_output":
            output = item.get("output", "")
            failed = isinstance(output, dict) and output.get("success") is False
            yield item["call_id"], _plain(output), failed


def _plain(content: Any) -> str:
    """The text of a result, which is a string or a list of parts."""
    if isinstance(content, dict):
        content = content.get("content", "")
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or json.dumps(part) for part in content)
