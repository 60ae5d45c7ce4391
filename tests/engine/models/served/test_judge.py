"""`model:REF` as a judge: which model is meant, where it answers, and how it is asked."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.endpoints import judges
from engine.environments.push import push_env
from engine.environments.registry import find_env, open_process, read_tasks
from engine.evidence.judges.calibration import calibrate_files
from engine.evidence.judges.trust import judge_refusal
from engine.home.run_dir import Home
from engine.machine.processes import deployments
from engine.models.served.judge import local_judge
from engine.runs.submit.admission import check_judges_beside
from envs.config.endpoints import is_reference, path_name
from envs.host.judge_budget import JudgeBudget

pytestmark = pytest.mark.timeout(60)  # a push with its audit, and deployments, on busy cores
TESTS = Path(__file__).parents[3]
ENV = """
from pathlib import Path
from envs import SingleTurnEnv, Task
from envs.judge import Judge, Rubric

FILE = Path(__file__).with_name("rubric.toml")

class Judged(SingleTurnEnv):
    rubric, judge = Rubric.from_file(FILE), Judge.from_file(FILE)
    def tasks(self):
        return [Task(str(n), f"Say {n}.", answer=str(n)) for n in range(4)]
    def score(self, task, completion):
        return self.rubric.score(task, completion, self.judge)

def load_environment():
    return Judged()
"""
RUBRIC = """
judge = "model:pebble"

[[criteria]]
id = "right"
description = "Is right."
"""


@pytest.fixture
def graded(home: Home, monkeypatch: pytest.MonkeyPatch):
    """Deployments are stand-ins; returns a function that says what they answer."""
    stand_in(monkeypatch, server=TESTS / "engine" / "fake_server.py")
    stand_in(monkeypatch, trainer=TESTS / "engine" / "fake_trainer.py")
    monkeypatch.setenv("HONESMITH_HOME", str(home.root))
    monkeypatch.setattr(deployments, "STOP_S", 0.5)
    yield lambda text: (home.root / "grade").write_text(text)
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")


def folder_of(tmp_path: Path, rubric: str = RUBRIC) -> Path:
    folder = tmp_path / "judged"
    folder.mkdir(exist_ok=True)
    (folder / "environment.py").write_text(ENV)
    (folder / "rubric.toml").write_text(rubric)
    return folder


def test_an_environment_asks_a_model_of_the_home_without_network_address_or_price(
    home: Home, tmp_path: Path, graded
):
    graded('{"right": 0.5}')
    record = find_env(home, push_env(home, folder_of(tmp_path), name="judged").env_id)
    (row,) = deployments.living(home)
    with open_process(record) as process:
        process.judge_budget = JudgeBudget()
        task = read_tasks(record)[0]
        score = process.score(task, "An answer.")
        assert (score["reward"], score["error"]) == (0.5, None)
        # Its deployment ends, as an idle one does: the next answer has another one.
        deployments.stop(home, row, "idle")
        again, cached = process.score(task, "Another answer."), process.score(task, "An answer.")
        assert (again["reward"], again["error"], cached["reward"]) == (0.5, None, 0.5)
        used = process.judge_budget.used
        assert (used.calls, used.tokens, used.cost, used.cached) == (2, 30, 0, 1)
    (other,) = deployments.living(home)
    assert other.deployment_id != row.deployment_id
    (used_judge,) = judges.judges_used(home, ["model:pebble"])
    assert used_judge.served_as == "pebble" and len(used_judge.weights) == 64
    assert used_judge.identity == local_judge(home, "model:pebble").identity


def test_a_judge_that_cannot_be_served_or_does_not_exist_is_named(
    home: Home, tmp_path: Path, graded
):
    (home.root / "behave").write_text("fail")
    with pytest.raises(UserError, match="the judge model:pebble is not served: the deployment"):
        push_env(home, folder_of(tmp_path), name="judged")
    with pytest.raises(UserError, match="the judge model:nobody cannot be used") as caught:
        rubric = RUBRIC.replace("pebble", "nobody")
        push_env(home, folder_of(tmp_path, rubric), name="judged")
    assert caught.value.code == "MODEL_NOT_FOUND"


def test_a_model_of_the_home_is_calibrated_by_its_weights(home: Home, tmp_path: Path, graded):
    graded('{"right": 1.0}')
    rows = tmp_path / "gold.jsonl"
    answers = [{"prompt": f"{n}?", "answer": f"a{n}", "label": n % 2} for n in range(4)]
    rows.write_text("\n".join(json.dumps(answer) for answer in answers))
    (tmp_path / "source").mkdir()
    rubric = tmp_path / "source" / "rubric.toml"
    rubric.write_text(RUBRIC)
    assert "never held against people" in judge_refusal(home, tmp_path, "reward")
    assert not deployments.living(home), "reading a verdict serves nothing"
    reply = calibrate_files(home, rubric, rows)
    assert (reply["url"], reply["model"], reply["trusted"]) == ("model:pebble", "pebble", False)
    # The same weights in a folder of their own are the same judge.
    folder = str(local_judge(home, "model:pebble").model.base_path)
    rubric.write_text(RUBRIC.replace("pebble", folder))
    assert "may not decide: only 4 gold" in judge_refusal(home, tmp_path, "reward")


def test_a_judge_that_fits_on_no_device_beside_the_run_is_refused_at_submit(home: Home, graded):
    record = SimpleNamespace(source=None)
    judge = local_judge(home, "model:pebble")
    needed = judge.least_bytes("cpu")

    def admitted(least: int, *totals: int) -> list[str]:
        figures = SimpleNamespace(least_memory=least)
        devices = [SimpleNamespace(id="cpu", kind="cpu", memory_total=total) for total in totals]
        return check_judges_beside(home, record, figures, devices)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        target = "engine.runs.submit.admission.registry.endpoints_of"
        patch.setattr(target, lambda _: ("model:pebble",))
        (warning,) = admitted(10**9, 10**9 + needed)
        assert warning.startswith("the judge model:pebble is served beside the run and takes 707.")
        assert admitted(10**9, 10**9, needed), "the judge has the second device"
        with pytest.raises(UserError, match="the judge model:pebble needs") as caught:
            admitted(10**9, 10**9)
    assert caught.value.code == "DOES_NOT_FIT"


@pytest.mark.parametrize("text", ["model:", "model:a b", 'model:a"b', "pebble", 5, "model:a\n"])
def test_what_names_no_model_is_no_reference(text: object):
    assert not is_reference(text)


def test_a_reference_becomes_a_name_that_a_path_can_have():
    assert is_reference("model:/models/a+b@step20")
    assert path_name("openai:big") == "big"
    assert path_name("model:org/name").startswith("model~")
    assert "/" not in path_name("model:org/name")
