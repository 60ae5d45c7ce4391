"""A judge asked by the name of an endpoint: what leaves the box, and what never enters it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_endpoint import Body, FakeEndpoint, Said, fake_endpoint

from envs.host.judge_budget import JudgeBudget
from envs.host.process import EnvProcess
from envs.metering.relay import Upstream

pytestmark = pytest.mark.timeout(30)
KEY = "sk-owner-4711-secret"
RUBRIC = """
judge = "openai:big"

[[criteria]]
id = "kind"
description = "Is kind."
"""
ENV = """
import json, os, socket, urllib.error, urllib.request
from pathlib import Path
from envs import Score, SingleTurnEnv, Task
from envs.judge import Judge, Rubric

FILE = Path(__file__).with_name("rubric.toml")

def post(path, token, body):
    url = os.environ["HONESMITH_RELAY"] + path
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + token)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code

def reach(port):
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
        return 1
    except OSError:
        return 0

class Judged(SingleTurnEnv):
    rubric, judge = Rubric.from_file(FILE), Judge.from_file(FILE)

    def tasks(self):
        return [Task("a", "Say hello.", "Hello.")]

    def score(self, task, completion):
        if completion == "variables":
            return Score(0.0, reason=json.dumps(dict(os.environ)))
        if completion.startswith("connect"):
            return float(reach(int(completion.split()[1])))
        if completion.startswith("post"):
            _, path, body = completion.split(" ", 2)
            return float(post(path, self.judge.key, json.loads(body)))
        if completion == "stranger":
            return float(post("/big/v1/chat/completions", "wrong", {"messages": []}))
        return self.rubric.score(task, completion, self.judge)

def load_environment():
    return Judged()
"""
TASK = {"id": "a", "prompt": [{"role": "user", "content": "Say hello."}], "answer": "Hello."}
CHAT = "/big/v1/chat/completions"


def kind(_: Body) -> Said:
    return Said('{"kind": 1}', usage={"prompt_tokens": 100, "completion_tokens": 10})


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with fake_endpoint(kind) as made:
        yield made


def started(folder: Path, url: str, **more: float) -> EnvProcess:
    (folder / "environment.py").write_text(ENV)
    (folder / "rubric.toml").write_text(RUBRIC)
    big = Upstream(url, "big-1", KEY, "abc", price_in=1e4, price_out=1e5, **more)  # type: ignore[arg-type]
    return EnvProcess(folder, upstreams={"big": big})


def test_a_judge_by_name_is_asked_with_the_key_that_never_enters_the_box(
    tmp_path: Path, endpoint: FakeEndpoint
):
    with started(tmp_path, endpoint.url) as process:
        process.judge_budget = JudgeBudget()
        score = process.score(TASK, "Hello, dear.")
        assert (score["reward"], score["error"]) == (1.0, None)
        assert endpoint.keys == [f"Bearer {KEY}"]
        assert endpoint.bodies[0]["model"] == "big-1"
        used = process.judge_budget.used
        assert (used.calls, used.tokens, used.cost) == (1, 110, pytest.approx(2.0))
        variables = json.loads(str(process.score(TASK, "variables").get("reason")))
        assert KEY not in json.dumps(variables) and endpoint.url not in json.dumps(variables)
        # Nothing else can be reached: not even the endpoint itself, which listens on this machine.
        port = endpoint.url.rpartition(":")[2].partition("/")[0]
        if process.level == "full":
            assert process.score(TASK, f"connect {port}")["reward"] == 0.0
            assert process.score(TASK, "connect " + str(_port_of(variables)))["reward"] == 1.0


def _port_of(variables: dict[str, str]) -> int:
    return int(variables["HONESMITH_RELAY"].rpartition(":")[2])


def test_only_questions_pass_with_the_owners_model_and_the_token_of_the_process(
    tmp_path: Path, endpoint: FakeEndpoint
):
    with started(tmp_path, endpoint.url) as process:
        asked = {"messages": [{"role": "user", "content": "?"}], "model": "dear", "stream": True}
        assert process.score(TASK, f"post {CHAT} {json.dumps(asked)}")["reward"] == 200
        assert endpoint.bodies == [{"messages": asked["messages"], "model": "big-1"}]
        for path, body, status in (
            ("/big/v1/files", asked, 404),
            ("/other/v1/chat/completions", asked, 404),
            ("//evil/v1/chat/completions", asked, 404),
            (CHAT, {"prompt": "?"}, 400),
        ):
            assert process.score(TASK, f"post {path} {json.dumps(body)}")["reward"] == status
        assert process.score(TASK, "stranger")["reward"] == 401
        assert len(endpoint.bodies) == 1


def test_what_the_run_allows_holds_even_for_code_that_asks_by_itself(
    tmp_path: Path, endpoint: FakeEndpoint
):
    with started(tmp_path, endpoint.url) as process:
        process.judge_budget = JudgeBudget(max_calls=2)
        asked = json.dumps({"messages": []})
        statuses = [process.score(TASK, f"post {CHAT} {asked}")["reward"] for _ in range(4)]
        assert statuses == [200, 200, 460, 460]
        assert "the run allows no more calls" in str(process.score(TASK, "Hi.")["error"])
        assert process.judge_budget.used.calls == 2 == len(endpoint.bodies)
        assert process.judge_budget.spent == "max_judge_calls = 2"


def test_no_redirect_is_followed_and_no_text_of_a_refusal_enters_the_box(tmp_path: Path):
    with fake_endpoint(kind) as other:
        place = f"{other.url}/chat/completions"
        answers = [
            Said(f"Incorrect API key: {KEY}", status=401),
            Said("", status=307, headers={"location": place}),
        ]
        with (
            fake_endpoint(lambda _: answers.pop(0)) as endpoint,
            started(tmp_path, endpoint.url) as process,
        ):
            error = str(process.score(TASK, "Hi.")["error"])
            assert error == "judge: openai:big answered 401"
            asked = json.dumps({"messages": []})
            assert process.score(TASK, f"post {CHAT} {asked}")["reward"] == 502
            assert other.bodies == []


def test_an_endpoint_that_is_silent_costs_one_score(tmp_path: Path):
    with started(tmp_path, "http://127.0.0.1:9/v1", timeout_s=1.0) as process:
        error = str(process.score(TASK, "Hi.")["error"])
        assert error == "judge: openai:big answered 504"


def test_an_endpoint_that_the_environment_does_not_list_is_named(tmp_path: Path):
    (tmp_path / "environment.py").write_text(ENV)
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    with EnvProcess(tmp_path) as process:
        error = str(process.score(TASK, "Hi.")["error"])
    assert 'environment.toml says endpoints = ["openai:big"]' in error
    assert os.environ.get("HONESMITH_RELAY") is None
