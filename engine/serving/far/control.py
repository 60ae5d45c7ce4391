"""What calls of this home ask of the process that has a host serve models: whether it answers, a
further adapter, its end. Chats do not pass here, they go through the tunnel."""

import hmac
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from engine.core.files import JsonObject
from engine.home.run_dir import DeployDir

_MOST_BODY = 64 << 10  # bytes
_LOOPBACK = ("127.0.0.1", "localhost")
# Takes the JSON object of a request, and returns (HTTP status, JSON object of the answer).
Route = Callable[[JsonObject], tuple[int, JsonObject]]


class ControlServer:
    """A server on loopback with the routes of a deployment that are not for chats. All but /health
    need the deployment's key."""

    def __init__(self, folder: DeployDir, routes: dict[str, Route]) -> None:
        """Listen on a free port, and answer in threads until `close`.

        Args:
            folder: of the deployment, with its key.
            routes: path -> what answers it.
        """
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(folder, routes))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _handler(folder: DeployDir, routes: dict[str, Route]) -> type[BaseHTTPRequestHandler]:
    """Make the class that answers one request: by `routes`, if it comes from this machine and has
    the key in `folder`."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds without a byte of a request

        def do_GET(self) -> None:
            """Answer a GET."""
            self._answer({})

        def do_POST(self) -> None:
            """Answer a POST with a JSON object in its body."""
            try:
                length = int(self.headers.get("Content-Length", 0))
                # What is too long is not read, and so is no JSON object.
                text = self.rfile.read(length) if 0 < length <= _MOST_BODY else b""
                body = json.loads(text or (b"{}" if length == 0 else b""))
            except (ValueError, RecursionError):
                body = None
            self._answer(body)

        def _answer(self, body: object) -> None:
            """Send the answer to a request with this body."""
            route = routes.get(self.path)
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in _LOOPBACK or self.headers.get("Origin"):  # a page in a browser
                self._send(421, {"error": "This server answers programs of this machine."})
            elif self.path != "/health" and not self._has_key():
                self._send(401, {"error": "A bearer token is needed."})
            elif route is None:
                self._send(404, {"error": "There is no such path."})
            elif not isinstance(body, dict):
                self._send(400, {"error": "A JSON object is needed."})
            else:
                self._send(*route(body))

        def _has_key(self) -> bool:
            """Tell whether the request has the deployment's key."""
            key = folder.key.read_bytes().strip()
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            scheme, _, token = given.partition(b" ")
            is_bearer = scheme.lower() == b"bearer" and key != b""
            return is_bearer and hmac.compare_digest(token.strip(), key)

        def _send(self, status: int, answer: JsonObject) -> None:
            """Send an answer as JSON."""
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: calls ask every few seconds."""

    return Handler
