"""The calls to a SkyPilot server, and what of its answers is refused."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fake_sky import FakeSky
from rented_machines import TOKEN

from engine.executors.sky.api import SkyApi
from engine.executors.ssh import FarError, HostLost, HostRefused

pytestmark = [pytest.mark.timeout(30)]


def api_of(sky: FakeSky, token: str = TOKEN) -> SkyApi:
    return SkyApi(sky.address, token, "SKY_TOKEN", "0123abcd")


def test_a_server_says_its_version_and_whether_it_takes_the_token(sky):
    assert api_of(sky).version() == "0.14.1"
    with pytest.raises(HostRefused) as error:
        api_of(sky, "another").version()
    assert "SKY_TOKEN" in error.value.hint
    with pytest.raises(HostRefused):
        api_of(sky, "another").owned("hs-")
    assert not api_of(sky).is_open()
    sky.token = ""
    assert api_of(sky).is_open()


def test_a_launch_that_fails_says_why_and_one_that_waits_is_taken_back(sky):
    api = api_of(sky)
    sky.refusal = "Failed to acquire resources in all zones in US."
    api.launch("hs-one", {"name": "hs-one"})
    while api.launches("hs-one")[0].is_open:
        pass
    (request,) = api.launches("hs-one")
    assert request.status == "FAILED"
    assert api.why_failed(request) == f"ResourcesUnavailableError: {sky.refusal}"
    sky.refusal = ""
    sky.gate.clear()
    api.launch("hs-two", {"name": "hs-two"})
    assert [each.is_open for each in api.launches("hs-two")] == [True]
    api.down("hs-two")
    assert [each.status for each in api.launches("hs-two")] == ["CANCELLED"]
    sky.gate.set()
    api.down("hs-two")
    assert api.find("hs-two") is None and sky.ever == []


def test_a_launch_is_found_behind_many_later_requests_for_its_cluster(sky):
    api = api_of(sky)
    sky.refusal = "Failed to acquire resources in all zones in US."
    api.launch("hs-one", {"name": "hs-one"})
    for _ in range(60):
        with pytest.raises(FarError):  # the fake has no such cluster
            api.why_not_ready("hs-one")
    (request,) = api.launches("hs-one")
    assert api.why_failed(request) == f"ResourcesUnavailableError: {sky.refusal}"


def test_the_launch_of_another_cluster_is_left_alone_on_a_server_that_lists_all(sky):
    api = api_of(sky)
    sky.is_old = True
    sky.gate.clear()
    api.launch("hs-one", {"name": "hs-one"})
    api.launch("hs-two", {"name": "hs-two"})
    api.down("hs-one")
    assert [each.status for each in api.launches("hs-one")] == ["CANCELLED"]
    assert [each.is_open for each in api.launches("hs-two")] == [True]
    api.down("hs-two")


def test_no_credential_goes_to_a_machine(sky):
    sky.gate.clear()
    api_of(sky).launch("hs-one", {"name": "hs-one"})
    (body,) = [body for path, body in sky.bodies if path == "/launch"]
    uploads = body["override_skypilot_config"].values()
    assert {each["remote_identity"] for each in uploads} == {"NO_UPLOAD"}
    assert body["include_credentials"] is False and body["retry_until_up"] is False
    assert TOKEN not in json.dumps(body)


@pytest.fixture(name="hostile")
def hostile_server() -> Iterator[Any]:
    """A server that answers with `answer`: status, headers, content."""

    class Server(ThreadingHTTPServer):
        answer: tuple[int, dict[str, str], bytes] = (200, {}, b"")
        asked: list[str] = []  # noqa: RUF012 - of the one server of a test

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            assert isinstance(self.server, Server)
            self.server.asked.append(self.path)
            status, headers, content = self.server.answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(content)
            except OSError:
                return

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "headers", "content"),
    [
        (200, {}, b"<html>a login page</html>"),
        (200, {}, b"[" * 100_000),
        (200, {}, b'"text"'),
        (200, {}, b"x" * (17 << 20)),
        (302, {"location": "http://127.0.0.1:1/steal"}, b""),
        (502, {}, b"Bad Gateway"),
    ],
)
def test_an_answer_that_is_none_of_skypilots_is_a_server_that_is_not_reached(
    hostile, status, headers, content
):
    hostile.answer = (status, headers, content)
    api = SkyApi(f"http://127.0.0.1:{hostile.server_port}", TOKEN, "SKY_TOKEN", "0123abcd")
    with pytest.raises(HostLost):
        api.version()
    with pytest.raises(HostLost):
        api.launches("hs-one")
    with pytest.raises(HostLost):
        api.find("hs-one")


@pytest.mark.parametrize("request_id", ["", "../../etc", "a b", "x" * 200])
def test_a_request_without_a_usable_id_is_not_asked_about(hostile, request_id):
    hostile.answer = (200, {"X-Skypilot-Request-ID": request_id}, b"null")
    api = SkyApi(f"http://127.0.0.1:{hostile.server_port}", "", "", "0123abcd")
    with pytest.raises(HostLost, match="no id"):
        api.find("hs-one")
    assert all("/api/get" not in path for path in hostile.asked)


def test_what_the_server_calls_wrong_is_an_error_of_what_was_asked(hostile):
    hostile.answer = (422, {}, b'{"detail": "field required"}')
    api = SkyApi(f"http://127.0.0.1:{hostile.server_port}", "", "", "0123abcd")
    with pytest.raises(FarError, match="field required"):
        api.launch("hs-one", {})
