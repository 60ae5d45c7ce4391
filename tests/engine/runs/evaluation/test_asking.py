"""Models behind a URL as runs: asked, scored, counted, capped, taken up again. No torch."""

import fcntl
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from answered import answer, evaluation, push
from fake_endpoint import Body, Said, fake_endpoint

from engine.core.errors import UserError
from engine.curation.curate import curate
from engine.curation.curated import Choices
from engine.environments.registry import find_env
from engine.evidence.compare.compare import compare_runs
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.runs import lifecycle
from engine.runs.reading.rollout_pages import RolloutQuery
from engine.runs.reading.rollouts import read_rollouts
from engine.runs.submit.requests import EvaluationRequest, TrainRequest
from mcp_server.api import verbs

pytestmark = pytest.mark.timeout(60)  # a run is a supervisor, a process and the environment's

KEY = "sk-a-key-that-nobody-may-ever-see-0123456789"
PRICES = {"price_in": 100.0, "price_out": 1000.0}  # 0.006 for the usage of a `Said`


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_KEY", KEY)


def adds(body: Body) -> Said:
    """Answers a sum rightly."""
    words = body["messages"][-1]["content"].rstrip("?").split()
    return Said(str(int(words[2]) + int(words[4])))


def ask(home: Home, env: str, ref: str, **more: Any) -> dict[str, Any]:
    return lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env, models=[ref], **more))


def ended(home: Home, queued: dict[str, Any], state: str = "done") -> tuple[RunDir, dict[str, Any]]:
    """The run after its end, with its status; none of its processes is left."""
    status = lifecycle.wait(home, queued["run_id"], "end", 25)
    assert status["state"] == state, status
    run = home.run(queued["run_id"])
    with open(run.lock, "rb") as lock:  # its supervisor holds it as long as it lives
        fcntl.flock(lock, fcntl.LOCK_EX)
    return run, status


def rows_of(run: RunDir, index: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.model_evals(index).read_text().splitlines()]


def test_a_model_behind_a_url_is_evaluated_as_any_other_and_compared_in_pairs(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a")
    wrong = [answer(f"9+{b}", "0", 0.0) for b in range(1, 10)]
    evaluation(home, env, {"ours": wrong}, attempts=1)
    with fake_endpoint(adds) as fake:
        queued = ask(home, env, fake.config(home, **PRICES))
        run, status = ended(home, queued)
    assert queued["estimate"]["calls"]["likely"] == 9.0 and queued["estimate"]["gpu_hours"] == 0
    assert "in money" in queued["summary"]
    assert fake.keys == [f"Bearer {KEY}"] * 9
    assert {body["model"] for body in fake.bodies} == {"fake-1"}
    assert all(body["temperature"] == 0 for body in fake.bodies)
    result = status["result"]
    assert result["models"][0]["success"] == 1.0 and result["models"][0]["tasks"] == 9
    total = result["endpoints"]["total"]
    assert (total["calls"], total["tokens_in"], total["tokens_out"]) == (9, 90, 45)
    assert total["cost"] == pytest.approx(9 * (10 * 100 + 5 * 1000) / 1e6)
    assert "95 % interval" in status["summary"] and "9 calls, 0.054 in money" in status["summary"]
    with Store(home) as store:
        row = store.get_run(run.id)
    assert (row.device, row.spent_hours, row.gpus) == ("", 0.0, 0)
    compared = compare_runs(home, ["ours", "openai:fake"], env)
    assert compared["comparisons"][0]["n"] == 9
    assert compared["comparisons"][0]["verdict"] == "better"
    read = read_rollouts(home, RolloutQuery(run.id, pick="best", step=0, limit=1)).to_json()
    assert read["rollouts"][0]["reward"] == 1.0
    for path in run.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_a_run_that_was_stopped_goes_on_without_asking_twice(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    reached, hurry = threading.Event(), threading.Event()

    def slow(body: Body) -> Said:
        if len(fake.bodies) > 4:
            reached.set()
            hurry.wait(0.3)  # so that the run is stopped long before it is done
        return adds(body)

    with fake_endpoint(slow) as fake:
        ref = fake.config(home, **PRICES, max_concurrency=1)
        queued = ask(home, env, ref, split="train", rows=20)
        assert reached.wait(20)
        lifecycle.cancel(home, queued["run_id"])
        run, _ = ended(home, queued, "cancelled")
        hurry.set()
        asked_before = len(fake.bodies)
        assert 5 <= asked_before < 20 and len(rows_of(run)) == asked_before
        # A kill between an answer and its row: the row is lost, the answer is not.
        kept = run.model_evals(0).read_text().splitlines(keepends=True)
        run.model_evals(0).write_text("".join(kept[:-2]) + kept[-2][:20])
        resumed = lifecycle.submit(home, TrainRequest(resume=run.id))
        assert any("not asked again" in warning for warning in resumed["warnings"])
        _, status = ended(home, resumed)
    assert len(fake.bodies) == 20 == len(set(fake.prompts()))
    assert status["result"]["endpoints"]["total"]["calls"] == 20
    assert len({row["task"] for row in rows_of(run)}) == 20 == len(rows_of(run))


def test_a_cap_of_money_is_never_passed_and_the_verdict_is_of_what_was_answered(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a")
    with fake_endpoint(adds) as fake:
        ref = fake.config(home, **PRICES, max_concurrency=3)
        settings = {"max_cost": 0.06, "max_tokens": 20}
        queued = ask(home, env, ref, split="train", settings=settings)
        run, status = ended(home, queued)
    result = status["result"]
    answered = result["models"][0]["tasks"]
    assert 1 <= answered < 72 and len(rows_of(run)) == answered == len(fake.bodies)
    assert result["endpoints"]["total"]["cost"] <= 0.06
    assert result["stopped_by"] == f"stopped by max_cost = 0.06: {answered} of 72 tasks answered"
    assert result["stopped_by"] in status["summary"]
    assert result["models"][0]["left_out"] == 72 - answered


def test_a_cap_of_calls_holds_and_one_that_allows_nothing_is_a_failure_that_says_so(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a")
    with fake_endpoint(adds) as fake:
        ref = fake.config(home, **PRICES)
        _, status = ended(home, ask(home, env, ref, settings={"max_calls": 4}))
        assert len(fake.bodies) == 4 == status["result"]["models"][0]["tasks"]
        _, status = ended(home, ask(home, env, ref, settings={"max_cost": 1e-6}), "failed")
        assert len(fake.bodies) == 4
    assert "max_cost = 1e-06 allowed no answer" in status["error"]["message"]


def test_several_attempts_are_drawn_and_become_training_rows_with_the_provider_named(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a")
    with fake_endpoint(adds) as fake:
        ref = fake.config(home, **PRICES)
        queued = ask(home, env, ref, split="train", attempts=2, rows=6)
        run, status = ended(home, queued)
    assert {(body["temperature"], body["seed"]) for body in fake.bodies} == {(1.0, 0), (1.0, 1)}
    assert status["result"]["models"][0]["attempts"] == 12
    curated = curate(home, "taught", Choices([run.id]), preview=False)
    assert (curated.kept, curated.sources[0].models) == (6, [ref])
    assert curated.sources[0].providers == {ref: "fake-1 at 127.0.0.1"}
    assert any("terms" in warning and "127.0.0.1" in warning for warning in curated.warnings)
    card = find_env(home, curated.env_id).dir / "source" / "curation.json"
    assert json.loads(card.read_text())["sources"][0]["providers"] == {ref: "fake-1 at 127.0.0.1"}
    # What trains on it is suggested with a model that can be trained.
    assert all(call.arguments.get("model") != ref for call in curated.next)


GAME = """
from envs import Message, MultiTurnEnv, Score, Task

TOOL = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}}}

class Look(MultiTurnEnv):
    tools = [TOOL]

    def tasks(self):
        return [Task(f"t{n}", f"Find {n}.", split="heldout") for n in range(3)]

    def start(self, task):
        return {"calls": [], "said": ""}

    def step(self, state, completion):
        state["said"] = completion.content
        if not completion.tool_calls:
            return None
        call = completion.tool_calls[0]
        state["calls"].append(call.arguments["at"])
        return [Message("tool", f"seen {call.arguments['at']}", tool_call_id=call.id)]

    def score(self, task, state):
        right = state["calls"] == [int(task.id[1:])] and state["said"] == "done"
        return Score(float(right), success=right)

def load_environment():
    return Look()
"""


def test_tools_and_several_turns_go_to_the_endpoint_as_its_api_writes_them(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a", GAME, "look")

    def plays(body: Body) -> Said:
        if len(body["messages"]) > 1:
            return Said("done")
        wanted = body["messages"][0]["content"].split()[1].rstrip(".")
        return Said(None, calls=[("look", json.dumps({"at": int(wanted)}))], finish="tool_calls")

    with fake_endpoint(plays) as fake:
        run, status = ended(home, ask(home, env, fake.config(home)))
    assert status["result"]["models"][0]["success"] == 1.0, rows_of(run)
    assert len(fake.bodies) == 6 and fake.bodies[0]["tools"][0]["function"]["name"] == "look"
    second = next(body for body in fake.bodies if len(body["messages"]) > 1)
    call, result = second["messages"][1:]
    assert call["tool_calls"][0]["function"]["arguments"] in ('{"at": 0}', '{"at": 1}', '{"at": 2}')
    assert result["role"] == "tool" and result["tool_call_id"] == call["tool_calls"][0]["id"]
    (row, *_) = rows_of(run)
    arguments = row["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"at": int(row["task"][1:])}
    assert row["tokens"] == 10 and row["completion"] == "done"


def test_an_endpoint_that_refuses_everything_ends_the_run_and_its_message_hides_the_key(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a")
    with fake_endpoint(lambda body: Said(f"bad key {KEY}", status=401)) as fake:
        run, status = ended(home, ask(home, env, fake.config(home)), "failed")
    assert status["error"]["kind"] == "config" and "401" in status["error"]["evidence"]
    assert len(fake.bodies) <= 8  # those that were under way
    for path in run.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_an_answer_that_the_provider_refuses_is_an_error_of_that_answer_alone(
    home: Home, tmp_path: Path
):
    env = push(home, tmp_path / "a")

    def picky(body: Body) -> Said:
        return Said("not this", status=400) if "9 + 3" in str(body["messages"]) else adds(body)

    with fake_endpoint(picky) as fake:
        run, status = ended(home, ask(home, env, fake.config(home, max_concurrency=1)))
    (refused,) = [row for row in rows_of(run) if row["error"]]
    assert (refused["task"], refused["stop_reason"], refused["reward"]) == ("9+3", "refused", 0.0)
    assert "openai:fake refused it: HTTP 400" in refused["error"]
    assert status["result"]["models"][0]["errors"] == 1


@pytest.mark.parametrize(
    ("config", "request_more", "code", "says"),
    [
        ({}, {"models": ["openai:none"]}, "MODEL_NOT_FOUND", "openai:fake"),
        ({"key_env": "NOT_SET"}, {}, "ENV_SECRETS", "NOT_SET"),
        ({}, {"settings": {"max_cost": 1.0}}, "SETTING_INVALID", "price_in"),
        ({"price_in": 1.0}, {"settings": {"max_cost": 1.0}}, "SETTING_INVALID", "price_out"),
        ({}, {"settings": {"thinking": True}}, "SETTING_NOT_APPLICABLE", "thinking"),
        ({}, {"perturb": ["all"]}, "BAD_ARGUMENT", "perturb"),
        ({}, {"models": ["openai:fake", "pebble"]}, "BAD_ARGUMENT", "compare_runs"),
        ({}, {"models": ["pebble"], "settings": {"max_cost": 1.0}}, "SETTING_NOT_APPLICABLE", ""),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(
    home: Home, tmp_path: Path, config, request_more, code, says
):
    env = push(home, tmp_path / "a")
    with fake_endpoint(adds) as fake:
        request = {"env_id": env, "models": [fake.config(home, **config)]} | request_more
        with pytest.raises(UserError) as caught:
            lifecycle.submit_evaluation(home, EvaluationRequest(**request))
        assert fake.bodies == []
    assert caught.value.code == code
    assert says in f"{caught.value.message} {caught.value.advice} {caught.value.field}"


def test_an_estimate_says_what_it_may_cost_and_asks_nothing(home: Home, tmp_path: Path):
    env = push(home, tmp_path / "a")
    with fake_endpoint(adds) as fake:
        ref = fake.config(home, **PRICES)
        reply = verbs.estimate_cost(home, TrainRequest(env_id=env, model=ref))
        assert fake.bodies == []
    assert reply["calls"]["likely"] == 9.0 == reply["rows"]
    assert 0 < reply["money"]["low"] < reply["money"]["likely"] < reply["money"]["high"]
    assert reply["next"][0]["tool"] == "evaluate" and "in money" in reply["summary"]


def test_the_process_loads_no_torch():
    code = (
        "import sys, engine.runs.evaluation.asking; "
        "print([n for n in sys.modules if n.split('.')[0] in ('torch', 'transformers')])"
    )
    said = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr
