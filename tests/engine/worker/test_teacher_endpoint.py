"""A teacher behind a real server on loopback: our own deployment, and servers that cannot teach."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from chat_server import chat_server
from loops import PEBBLE

from engine.home.run_dir import Home
from engine.worker import teacher_endpoint
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Stopped
from engine.worker.core.trajectory import Completion, Trajectory
from engine.worker.network.policy import load_base, pick_device
from engine.worker.teacher_endpoint import SAMPLE, Endpoint, EndpointTeacher
from engine.worker.teachers import NetworkTeacher

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

Answer = Callable[[dict[str, Any]], tuple[int, Any]]  # a request's body to status and reply


def go_on() -> None:
    """Nobody asks this run to stop."""


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """The URL, ending in /v1, of a server that answers every POST by `answer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, reply = answer(body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v1"
        finally:
            http.shutdown()
            thread.join()


def rated(body: dict[str, Any], tokens: Sequence[str] | None = None) -> tuple[int, Any]:
    """The reply of a server that gives the token at place n the log-probability -n."""
    count = len(body["prompt"]) + body["max_tokens"]
    numbers = [None, *(-float(n) for n in range(1, count))]
    return 200, {"choices": [{"logprobs": {"token_logprobs": numbers, "tokens": tokens}}]}


def talk() -> list[Trajectory]:
    """Trajectories of one turn and of two."""
    one = Trajectory("a", [], [5, 6, 7])
    one.add_completion(Completion([40, 41, 42, 2], [0.0] * 4, True))
    two = Trajectory("b", [], [9, 10])
    two.add_completion(Completion([50, 2], [0.0] * 2, True))
    two.add_environment([11, 12, 13])
    two.add_completion(Completion([60, 61], [0.0] * 2, False))
    return [one, two]


def test_a_deployment_rates_as_the_same_model_in_this_process_does(home: Home) -> None:
    base = load_base(PEBBLE, pick_device("cpu"), "float32")
    with chat_server(home) as (_, url):
        teacher = EndpointTeacher(Endpoint(url, "pebble", "sesame"), go_on)
        ids = base.tokenizer.encode(SAMPLE, add_special_tokens=False)
        teacher.check_tokens(ids, lambda ids: str(base.tokenizer.decode(list(ids))), "pebble")
        over_http = teacher.logprobs(talk(), 0)
        here = NetworkTeacher(base.network, None).logprobs(talk(), 1000)
        assert [len(numbers) for numbers in over_http] == [4, 4]
        for theirs, ours in zip(over_http, here, strict=True):
            assert theirs == pytest.approx(ours, abs=2e-5)
        unknown = EndpointTeacher(Endpoint(url, "nobody", "sesame"), go_on)
        with pytest.raises(WorkerFailure, match=r"nobody at .* refused") as caught:
            unknown.logprobs(talk(), 0)
        assert "404" in caught.value.evidence
        stranger = EndpointTeacher(Endpoint(url, "pebble", "wrong"), go_on)
        with pytest.raises(WorkerFailure) as caught:
            stranger.logprobs(talk(), 0)
        assert "401" in caught.value.evidence and "wrong" not in str(caught.value.evidence)
        for each in (teacher, unknown, stranger):
            each.close()


def test_of_several_turns_what_the_policy_wrote_is_rated() -> None:
    with server(rated) as url:
        teacher = EndpointTeacher(Endpoint(url, "big"), go_on)
        assert teacher.logprobs(talk(), 0) == [[-3.0, -4.0, -5.0, -6.0], [-2.0, -3.0, -7.0, -8.0]]
        teacher.close()


@pytest.mark.parametrize(
    "logprobs", [None, {}, {"token_logprobs": [None, -1.0]}, {"token_logprobs": [None] * 9}]
)
def test_a_server_without_log_probabilities_of_the_prompt_is_named(logprobs: Any) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [{"text": "hello", "logprobs": logprobs}]}

    with server(answer) as url:
        teacher = EndpointTeacher(Endpoint(url, "big"), go_on)
        with pytest.raises(WorkerFailure, match="gives no log-probabilities of a prompt") as caught:
            teacher.logprobs(talk(), 0)
        assert f"big at {url}" in caught.value.message
        teacher.close()


def test_a_server_whose_model_reads_other_tokens_is_refused_naming_both() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return rated(body, tokens=["The", " quick", " other"])

    with server(answer) as url:
        teacher = EndpointTeacher(Endpoint(url, "big"), go_on)
        words = {1: "The", 2: " quick", 3: " brown"}
        with pytest.raises(WorkerFailure, match=r"big at .* another tokenizer than") as caught:
            teacher.check_tokens([1, 2, 3], lambda ids: words[ids[0]], "pebble")
        assert caught.value.evidence == "token 3 is ' other' there and ' brown' here"
        teacher.check_tokens([1, 2], lambda ids: words[ids[0]], "pebble")
        teacher.close()


def test_a_busy_server_is_asked_again_and_a_dead_one_is_said_to_be_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher_endpoint, "WAITS_S", (0.01,) * 4)
    refusals = [503, 429]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return (refusals.pop(), {}) if refusals else rated(body)

    with server(answer) as url:
        teacher = EndpointTeacher(Endpoint(url, "big"), go_on)
        assert len(teacher.logprobs(talk(), 0)) == 2
        assert refusals == []
    with pytest.raises(WorkerFailure, match="does not answer") as caught:
        teacher.logprobs(talk(), 0)
    assert caught.value.kind == "endpoint" and "5 attempts" in caught.value.evidence
    teacher.close()


def test_a_run_that_was_asked_to_stop_waits_for_no_teacher() -> None:
    def stop() -> None:
        raise Stopped

    with server(rated) as url:
        teacher = EndpointTeacher(Endpoint(url, "big"), stop)
        with pytest.raises(Stopped):
            teacher.logprobs(talk(), 0)
        teacher.close()
