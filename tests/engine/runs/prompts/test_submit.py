"""What a search would ask and cost is said before it is asked; what cannot work is refused."""

from pathlib import Path
from typing import Any

import pytest
from prompted import BAD, DEV, push_sums

from engine.core.errors import UserError
from engine.dry_run.dry_run import dry_run
from engine.dry_run.plan_cost import estimate_request
from engine.environments.push import push_env
from engine.environments.registry import find_env
from engine.environments.versions import seal
from engine.home.run_dir import Home
from engine.records.settings import PromptSettings
from engine.runs import lifecycle
from engine.runs.prompts import checks
from engine.runs.prompts.submit import resolve
from engine.runs.prompts.tasks import search_tasks
from engine.runs.submit.requests import TrainRequest
from mcp_server.protocol.guard import models_of

pytestmark = pytest.mark.timeout(30)  # pushes run the environment's code

PLAIN = """
from envs import Score, SingleTurnEnv, Task

class Asked(SingleTurnEnv):
    def tasks(self):
        def prompt(n):
            told = {{"role": "system", "content": f"Rule {{n}}."}}
            return [told, {{"role": "user", "content": str(n)}}] if {varied} else str(n)
        return [Task(str(n), prompt(n), answer=str(n)) for n in range({rows})]
{score}

def load_environment():
    return Asked()
"""
SCORE = """
    def score(self, task, completion):
        return Score(float(completion == task.answer), success=completion == task.answer)
"""


def pushed(
    home: Home, folder: Path, *, rows: int = 40, score: str = SCORE, varied: bool = False
) -> str:
    folder.mkdir()
    source = PLAIN.format(rows=rows, score=score or "    pass", varied=varied)
    (folder / "environment.py").write_text(source)
    return push_env(home, folder, name=folder.name).env_id


def endpoint(home: Home, name: str = "big", **more: Any) -> str:
    lines = [f"[endpoints.{name}]", 'url = "http://127.0.0.1:9/v1"', 'model = "m"']
    lines += [f"{key} = {value}" for key, value in more.items()]
    home.config_file.write_text("\n".join(lines) + "\n")
    return f"openai:{name}"


def request(env: str, **settings: Any) -> TrainRequest:
    return TrainRequest(env_id=env, algorithm="prompt", settings=settings)


def refusal(home: Home, wanted: TrainRequest) -> UserError:
    with pytest.raises(UserError) as refused:
        lifecycle.submit(home, wanted)
    return refused.value


def test_what_cannot_work_is_refused_with_the_next_move(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    env = push_sums(home, tmp_path / "sums", size=5)
    named = endpoint(home)
    assert "there are: openai:big" in refusal(home, request(env)).advice.text
    assert refusal(home, request(env, reflection="small")).code == "MODEL_NOT_FOUND"
    assert "no price_in" in refusal(home, request(env, reflection="big", max_cost=1.0)).message
    few = refusal(home, request(env, reflection=named, max_rollouts=10))
    assert few.field == "settings.max_rollouts" and "does not suffice for one round" in few.message
    assert (
        refusal(home, request(env, reflection=named, group_size=4)).code == "SETTING_NOT_APPLICABLE"
    )
    unscored = pushed(home, tmp_path / "unscored", score="")
    assert "scores nothing" in refusal(home, request(unscored, reflection=named)).message
    varied = pushed(home, tmp_path / "varied", varied=True)
    assert "different system messages" in refusal(home, request(varied, reflection=named)).message
    plan = TrainRequest(env_id=env, algorithm="prompt", then=[{"algorithm": "evaluate"}])
    assert "no step of a plan" in refusal(home, plan).message
    monkeypatch.setattr(checks, "PACKAGE", "a_package_that_nobody_has")
    missing = refusal(home, request(env, reflection=named))
    assert "honesmith[prompt]" in missing.advice.text


def test_a_dry_run_says_what_is_asked_and_costs_and_the_estimate_agrees(home: Home, tmp_path: Path):
    env = push_sums(home, tmp_path / "sums", size=5)
    named = endpoint(home, price_in=1.0, price_out=2.0)
    told = dry_run(home, env, "pebble", "prompt", {"reflection": "big", "max_tokens": 8})
    by_name = {check["name"]: check for check in told["checks"]}
    assert not [check for check in told["checks"] if check["status"] == "fail"], told["checks"]
    assert "to reflect on" in by_name["resolve"]["detail"]
    assert told["settings"]["reflection"] == named
    assert told["sources"]["max_tokens"] == "user" and told["sources"]["max_calls"] == "recipe"
    assert told["next"][0]["tool"] == "submit_train"
    figures = estimate_request(home, request(env, reflection="big", max_tokens=8))
    assert figures["answers"] == told["estimate"]["answers"]
    heldout = find_env(home, env).rows["heldout"]
    assert figures["answers"] == told["settings"]["max_rollouts"] + 2 * heldout
    assert 0 < figures["money"]["low"] <= figures["money"]["likely"] <= figures["money"]["high"]
    none = dry_run(home, env, "pebble", "prompt", {})
    assert none["summary"].startswith("Not ready: endpoint")


def test_tasks_that_choose_are_dev_tasks_or_train_tasks_that_nobody_is_shown(
    home: Home, tmp_path: Path
):
    plain = find_env(home, push_sums(home, tmp_path / "a", size=6))
    with_dev = find_env(home, push_sums(home, tmp_path / "b", size=6, other=DEV))
    named = endpoint(home)
    settings = resolve(home, request(plain.env_id, reflection=named, select_rows=7)).settings
    assert isinstance(settings, PromptSettings)
    tasks = search_tasks(home, plain, settings)
    reflected, choosing = (
        {task["id"] for task in side} for side in (tasks.reflected, tasks.choosing)
    )
    assert len(choosing) == 7 and not reflected & choosing
    assert {task["split"] for task in (*tasks.reflected, *tasks.choosing)} == {"train"}
    assert search_tasks(home, plain, settings) == tasks
    of_dev = search_tasks(home, with_dev, settings)
    assert {task["split"] for task in of_dev.choosing} == {"dev"}
    assert len(of_dev.reflected) == with_dev.rows["train"]


def test_train_tasks_that_hold_a_sealed_exam_are_not_sent_away(home: Home, tmp_path: Path):
    exam = push_sums(home, tmp_path / "exam", 3, "Say it.", '"heldout"', name="exam")
    env = find_env(home, push_sums(home, tmp_path / "sums", size=6, system=BAD))
    named = endpoint(home)
    plan = resolve(home, request(env.env_id, reflection=named))
    assert plan.tasks.sealed == 0
    seal(home, exam, looks=3)
    plan = resolve(home, request(env.env_id, reflection=named))
    assert plan.tasks.sealed > 0
    shown = {task["id"] for task in plan.tasks.reflected}
    assert shown and not {f"{a}+{b}" for a in range(3) for b in range(3)} & shown
    assert refusal(home, request(exam, reflection=named)).code == "ENV_SEALED"


def test_another_key_asks_only_endpoints_that_are_shared():
    for name in ("big", "openai:big"):
        asked = models_of("submit_train", {"settings": {"reflection": name}})
        assert asked == ["openai:big"]
