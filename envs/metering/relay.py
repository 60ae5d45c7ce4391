"""Lets user code ask models by name, without the address, the key or a network.

The env process reaches one port, on which this relay answers outside its box. What is asked there
for a name goes to the one address that the owner of the home wrote for it, or at which a model of
the home is served, with the key, which never enters the box. Calls, tokens and money are counted
and capped here, where user code cannot reach.

Standard library only.
"""

import hmac
import http.client
import json
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from envs.config.endpoints import NAMES, SPENT
from envs.metering.judge_calls import JudgeUse, Meter

CHAT = "/v1/chat/completions"  # what stands behind the name in a path; nothing else is asked
MOST_ASKED, MOST_ANSWERED = 4 << 20, 1 << 20  # bytes of a question and of a reply
IDLE_SECONDS = 600.0  # a connection from the box that is silent for longer is closed
# The fields of a question that are passed on; the model is always that of the owner.
PASSED = (
    "messages temperature top_p max_tokens max_completion_tokens seed stop response_format"
    " reasoning_effort"
).split()


# OSError: no connection or too slow; HTTPException: no HTTP; the others: no reply of a chat API.
_NO_ANSWER = (
    *(OSError, http.client.HTTPException),
    *(ValueError, TypeError, ArithmeticError, RecursionError),
)


# Statuses of a server that has taken the port of a deployment which has ended: it knows neither
# that key nor that model.
_MOVED = (401, 404)


@dataclass(frozen=True)
class Address:
    """Where a model is asked: the URL of its server up to and including /v1, and the bearer token,
    "" for none."""

    url: str
    key: str = ""


class NotServed(OSError):
    """A model of the home cannot be served now; the text says why."""


@dataclass
class Upstream:
    """A model that user code knows by its name.

    Args:
        url: the address of its server, up to and including /v1; "" with `serve`.
        model: the model's name there.
        key: the bearer token; "" for none.
        identity: stands for url and model where judges are told apart (`Judge.judge_hash`).
        price_in, price_out: money per million tokens of prompts and of answers.
        timeout_s: seconds after which one request is given up.
        at_once: the most requests under way at once.
        serve: of a model of the home: returns where it is served, and serves it first if necessary.
            It raises NotServed if that fails. None for a model whose url is known.
    """

    url: str
    model: str
    key: str = ""
    identity: str = ""
    price_in: float = 0.0
    price_out: float = 0.0
    timeout_s: float = 120.0
    at_once: int = 4
    serve: Callable[[], Address] | None = None
    gate: threading.BoundedSemaphore = field(init=False, repr=False, compare=False)
    _address: Address | None = field(default=None, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the gate, a semaphore that all processes of one environment share; it lets `at_once`
        requests pass at once."""
        self.gate = threading.BoundedSemaphore(self.at_once)
        self._lock = threading.Lock()
        if self.serve is None:
            self._address = Address(self.url, self.key)

    def address(self, gone: Address | None = None) -> Address:
        """Return where the model is asked. A model of the home is started first if nothing serves
        it yet.

        `gone` is an address that has stopped to answer: if that is still the known one, the model
        is started again and gets a new address. Raises NotServed if it cannot be served.
        """
        with self._lock:  # so that two requests at once do not start the model twice
            if self.serve is not None and self._address in (None, gone):
                self._address = self.serve()
            assert self._address is not None  # the url is known, or it was just found
            return self._address


@dataclass(frozen=True)
class _Answer:
    """What goes back into the box: an HTTP status and a JSON text."""

    status: int
    data: bytes

    @staticmethod
    def refused(status: int, message: str) -> "_Answer":
        """Return an answer that refuses a request: an HTTP status of an error, and a JSON body in
        the form in which OpenAI's API gives errors."""
        return _Answer(status, json.dumps({"error": {"message": message}}).encode())


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: nothing is asked but the address that the owner wrote."""

    def redirect_request(
        self, req: object, fp: object, code: object, msg: object, headers: object, newurl: object
    ) -> None:
        """Return None, which makes urllib raise the redirect as an HTTPError. The arguments are
        those that urllib passes."""


class Relay:
    """The relay of one env process.

    Args:
        upstreams: name -> the model that may be asked by it.

    Attributes:
        meter: counts what was asked through this relay, and holds how much more may be.
        own_end, parent_end: a pair of sockets; through `parent_end` the parent of user code sends
            the listening socket that user code can reach.
    """

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        """Store the models (name -> model); nothing is answered before `serve`."""
        self.upstreams = dict(upstreams)
        self.meter = Meter()
        self.own_end, self.parent_end = socket.socketpair()
        # User code has to send this token: where namespaces do not work, every process of this
        # machine can reach the port.
        self._token = secrets.token_urlsafe(24)
        self._opener = urllib.request.build_opener(NoRedirects)
        self._server: ThreadingHTTPServer | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable (name -> value) that tells user code which models it may ask: a
        JSON object by name. It holds neither address nor key of a model."""
        models_by_name = {
            name: {
                "model": upstream.model,
                "identity": upstream.identity,
                "timeout_s": upstream.timeout_s,
                "token": self._token,
            }
            for name, upstream in self.upstreams.items()
        }
        return {NAMES: json.dumps(models_by_name)}

    def serve(self, seconds: float) -> None:
        """Receive the listening socket from the parent of user code and answer on it, in threads.

        If none comes within `seconds`, nothing is served: the process has then failed to start.
        """
        self.own_end.settimeout(seconds)
        try:
            # One byte with one descriptor, that of the socket.
            _, descriptors, _, _ = socket.recv_fds(self.own_end, 1, 1)
        except OSError:
            return
        if descriptors:
            self._server = _server_on(socket.socket(fileno=descriptors[0]), self)

    def close(self) -> None:
        """Stop answering and close the sockets; a second call does nothing."""
        self.own_end.close()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def answer(self, path: str, token: str, data: bytes) -> _Answer:
        """Pass one chat request of user code on to the model that it names; return what goes back.

        A request that may not be passed on gets an error: 401 for a wrong token, 404 for another
        path, 400 for a body that is no chat request, SPENT if the run allows no more calls.

        Args:
            path: the path of the request: "/", the model's name, and CHAT.
            token: its header Authorization.
            data: its body.
        """
        name = path.removeprefix("/").removesuffix(CHAT)
        upstream = self.upstreams.get(name)
        if not hmac.compare_digest(token.encode(), f"Bearer {self._token}".encode()):
            return _Answer.refused(401, "this port answers one env process alone")
        if upstream is None or path != f"/{name}{CHAT}":
            return _Answer.refused(404, f"nothing is asked here but /NAME{CHAT}")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return _Answer.refused(400, "a question is a JSON object with messages")
        question = {key: body[key] for key in PASSED if key in body}
        question["model"] = upstream.model  # whatever model the request names
        with upstream.gate:
            if not self.meter.admit():
                return _Answer.refused(SPENT, "the run allows no more calls")
            return self._ask(upstream, question)

    def _ask(self, upstream: Upstream, question: Mapping[str, Any]) -> _Answer:
        """Send a question (the body of a chat request) to a model, and count it if it is answered.

        If a model of the home is gone from its address, the question is sent once more, to the
        address at which it is served then. A model that cannot be served gives the status 503.
        """
        try:
            address = upstream.address()
            answer, is_gone = self._ask_at(address, upstream, question)
            if is_gone and upstream.serve is not None:
                new_address = upstream.address(gone=address)
                answer, _ = self._ask_at(new_address, upstream, question)
        except NotServed:
            return _Answer.refused(503, "the model is not served now")
        return answer

    def _ask_at(
        self, address: Address, upstream: Upstream, question: Mapping[str, Any]
    ) -> tuple[_Answer, bool]:
        """Send a question to one address, once. Returns (the answer, whether the model seems not to
        be there any more).

        Nothing of a failure is passed on but its status: some servers repeat a part of the key. An
        answer that repeats the key gets "[secret]" in its place.
        """
        headers = {"Content-Type": "application/json"}
        if address.key:
            headers["Authorization"] = f"Bearer {address.key}"
        url = f"{address.url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(question).encode(), headers)
        began = time.monotonic()
        try:
            with self._opener.open(request, timeout=upstream.timeout_s) as reply:
                data = reply.read(MOST_ANSWERED + 1)
            prompt_tokens, completion_tokens, tokens = _usage_in(data)
        except urllib.error.HTTPError as error:
            is_redirect = 300 <= error.code < 400  # none is followed, here or in the box
            status = 502 if is_redirect else error.code
            refused = _Answer.refused(status, f"the endpoint answered {error.code}")
            return refused, error.code in _MOVED
        except _NO_ANSWER as error:
            text = f"the endpoint gave no answer: {type(error).__name__}"
            is_gone = not isinstance(error, TimeoutError)  # a slow model is still there
            return _Answer.refused(504, text), is_gone
        # Prices are per million tokens.
        cost = (prompt_tokens * upstream.price_in + completion_tokens * upstream.price_out) / 1e6
        seconds = time.monotonic() - began
        self.meter.count(JudgeUse(calls=1, tokens=tokens, seconds=seconds, cost=cost))
        if address.key:
            data = data.replace(address.key.encode(), b"[secret]")
        return _Answer(200, data), False


def _usage_in(data: bytes) -> tuple[int, int, int]:
    """Return (tokens of the prompt, tokens of the answer, tokens of both) that a model's reply says
    it took; 0 for what it does not say.

    `data` is the body of the reply. Raises ValueError or TypeError if it is longer than
    MOST_ANSWERED bytes, or no JSON object.
    """
    if len(data) > MOST_ANSWERED:
        raise ValueError("the reply is too long")
    reply = json.loads(data)
    if not isinstance(reply, dict):
        raise TypeError("the reply is no JSON object")
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        usage = {}
    prompt = max(0, int(usage.get("prompt_tokens") or 0))
    completion = max(0, int(usage.get("completion_tokens") or 0))
    total = max(0, int(usage.get("total_tokens") or 0))
    return prompt, completion, total or prompt + completion


def _server_on(listener: socket.socket, relay: Relay) -> ThreadingHTTPServer:
    """Start and return an HTTP server that answers by `relay` on a socket that listens already.

    It answers in threads of its own, until its `shutdown` is called.
    """

    class Handler(BaseHTTPRequestHandler):
        """Answers the requests of one connection."""

        timeout = IDLE_SECONDS

        def do_POST(self) -> None:
            """Read one request, have `relay` answer it, and send the answer."""
            length = self.headers.get("Content-Length", "")
            # isascii: other alphabets have digits too, which int() would accept.
            is_number = length.isascii() and length.isdigit()
            if not is_number or int(length) > MOST_ASKED:
                answer = _Answer.refused(413, f"a question has at most {MOST_ASKED >> 20} MiB")
            else:
                data = self.rfile.read(int(length))
                answer = relay.answer(self.path, self.headers.get("Authorization", ""), data)
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer.data)))
            self.end_headers()
            self.wfile.write(answer.data)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing: standard error may be anything here."""

        def version_string(self) -> str:
            """Return the header Server, which shall tell nothing of this machine."""
            return "relay"

    class Server(ThreadingHTTPServer):
        """A server whose open connections do not keep the process alive."""

        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore a client that went away."""

    # The address is not bound: the server gets `listener` in the place of its own socket.
    server = Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    serve = partial(server.serve_forever, poll_interval=0.1)  # seconds until a shutdown is noticed
    threading.Thread(target=serve, daemon=True, name="relay").start()
    return server
