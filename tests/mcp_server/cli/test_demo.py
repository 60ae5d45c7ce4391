"""The demo: the whole loop in order, an exit status that means it, nothing left running."""

import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import flat
from rich.console import Console

from engine.core.errors import UserError
from engine.evidence.verdict.regression import KeptSkills
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.models import library
from engine.settings import resolution
from mcp_server.api import verbs
from mcp_server.cli.demo import loop as demo
from mcp_server.cli.demo.plans import PLANS, DemoPlan
from mcp_server.protocol.app import build_server
from mcp_server.screen.display import Stage
from mcp_server.screen.render import duration, sparkline

EXAMPLES = Path(__file__).parents[3] / "envs" / "examples"
LOOP = [
    "get_status",
    "read_playbook",
    "push_env",
    "dry_run",
    "estimate_cost",
    "submit_train",
    "wait_run",
    "submit_train",
    "wait_run",
    "read_rollouts",
    "evaluate",
    "wait_run",
    "compare_runs",
    "compare_runs",
    "deploy",
    "chat",
    "deploy",
    "deploy",
]


class Engine:
    """Answers every verb as a home would in which all goes as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.verdict = changes.get("verdict", "better")
        self.compared = changes.get("compared", "better")
        self.low = changes.get("low", 0.2)
        self.state = changes.get("state", "done")
        names = {*LOOP, "read_logs", "cancel_run"}
        for name in names:
            monkeypatch.setattr(verbs, name, self._stand_in(name))
        skills = KeptSkills("kept", [], "Kept skills: no clear loss.")
        monkeypatch.setattr(demo, "kept_skills", lambda run_dir: skills)
        monkeypatch.setattr(demo, "write_report", lambda home, run_id: Path("/h/report.html"))

    def _stand_in(self, name: str) -> Any:
        bind = inspect.signature(getattr(verbs, name))

        def verb(*args: Any, **kwargs: Any) -> Any:
            given = flat(bind.bind(*args, **kwargs).arguments)
            given.pop("home", None)
            if name != "read_logs":
                self.calls.append((name, given))
            return getattr(self, name, lambda **_: {"summary": name})(**given)

        return verb

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.calls]

    def arguments(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == name]

    def read_playbook(self, section: str) -> str:
        return "# The loop"

    def push_env(self, path: str, **_: Any) -> dict[str, Any]:
        assert (Path(path) / "environment.py").is_file()
        return {"summary": "pushed", "env_id": f"{Path(path).name}@1"}

    def submit_train(self, algorithm: str, **_: Any) -> dict[str, Any]:
        return {"summary": "queued", "run_id": f"arith-{algorithm}-1", "state": "queued"}

    def evaluate(self, env_id: str, **_: Any) -> dict[str, Any]:
        return {"summary": "queued", "run_id": "arith-eval-1", "state": "queued"}

    def wait_run(self, run_id: str, **_: Any) -> dict[str, Any]:
        verdict = "" if "eval" in run_id else self.verdict
        reply = {"summary": "over", "run_id": run_id, "state": self.state, "verdict": verdict}
        evidence = {"before": {"value": 0.1}, "after": {"value": 0.9}, "metric": "success"}
        return reply | {"result": {"evidence": evidence}}

    def read_logs(self, **_: Any) -> dict[str, Any]:
        rows = [[1, 2.0, 0.1], [2, 1.0, 0.9]]
        return {"columns": ["step", "loss", "heldout_success"], "rows": rows}

    def compare_runs(self, ids: list[str], **_: Any) -> dict[str, Any]:
        comparisons = [{"interval": [self.low, self.low + 0.2]}]
        said = f"{ids[1]} is {self.compared}"
        return {"summary": said, "verdict": self.compared, "comparisons": comparisons}

    def chat(self, **_: Any) -> dict[str, Any]:
        answers = [{"model": "tuned", "answer": "#### 85"}, {"model": "pebble", "answer": "75"}]
        return {"summary": "answered", "answers": answers}


def play(home: Home, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """The demo with its server in this process: what it says is the client's doing all the same."""
    monkeypatch.setattr(demo, "StdioServerParameters", lambda **_: build_server(home, []))
    return demo.run_demo(home.root, **options)


def test_the_demo_plays_the_whole_loop_and_ends_well(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    engine = Engine(monkeypatch)
    assert play(home, monkeypatch, seed=7) == 0
    assert engine.order == LOOP
    sft, grpo = engine.arguments("submit_train")
    assert (sft["algorithm"], sft["model"]) == ("sft", "pebble")
    assert (grpo["algorithm"], grpo["model"]) == ("grpo", "arith-sft-1@best")
    assert sft["settings"]["seed"] == grpo["settings"]["seed"] == 7
    (evaluation,) = engine.arguments("evaluate")
    assert evaluation["models"] == ["pebble", "arith-sft-1@best", "arith-grpo-1@best"]
    assert evaluation.get("split", "heldout") == "heldout"
    (chat,) = engine.arguments("chat")
    assert chat["compare_to"] == "pebble"
    _, *stops = engine.arguments("deploy")
    assert [(stop["run_id"], stop["action"]) for stop in stops] == [
        ("arith-grpo-1@best", "stop"),
        ("pebble", "stop"),
    ]
    shown = capsys.readouterr().out
    assert "Verdict: better" in shown
    assert "#### 85" in shown and "75" in shown
    assert "/h/report.html" in shown
    assert "held-out success 0.100 -> 0.900" in shown
    assert "\x1b" not in shown


def test_a_slow_model_is_waited_for_and_asked_on(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    engine = Engine(monkeypatch)
    loading = [UserError("DEPLOY_FAILED", "still being loaded", retryable=True)] * 2

    def deploy(action: str = "start", **_: Any) -> dict[str, Any]:
        if action == "start" and loading:
            raise loading.pop()
        return {"summary": "deployed"}

    def chat(conversation: str = "", **_: Any) -> dict[str, Any]:
        part = {"model": "tuned", "answer": "#### ", "tokens": 2, "partial": True}
        rest = {"model": "tuned", "answer": "85", "tokens": 1}
        other = {"model": "pebble", "answer": "75", "tokens": 1}
        answers = [rest] if conversation else [part, other]
        return {"summary": "answered", "answers": answers, "conversation": "c-1"}

    engine.deploy, engine.chat = deploy, chat  # type: ignore[attr-defined]
    assert play(home, monkeypatch, seed=7) == 0
    assert loading == []
    _, going_on = engine.arguments("chat")
    assert (going_on["model"], going_on["conversation"]) == ("tuned", "c-1")
    assert going_on["max_tokens"] == engine.arguments("chat")[0]["max_tokens"] - 2
    assert "#### 85" in capsys.readouterr().out


def test_the_second_demo_trains_a_fetched_model_on_two_tasks(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    engine = Engine(monkeypatch)
    fetched: list[str] = []

    def add(home: Home, source: str, name: str, say: Any) -> dict[str, Any]:
        fetched.append(source)
        return {"summary": f"{source} can be used"}

    monkeypatch.setattr(library, "add", add)
    assert play(home, monkeypatch, model="smollm2") == 0
    assert fetched == ["smollm2"]
    first, second = PLANS["smollm2"].trainings
    pushed = [Path(given["path"]).name for given in engine.arguments("push_env")]
    assert pushed == [first.env, second.env]
    submits = engine.arguments("submit_train")
    assert [given["model"] for given in submits] == ["smollm2", "smollm2"], "each from the base"
    assert [given["expect"] for given in submits] == ["better", "better"]
    assert len(engine.arguments("dry_run")) == len(engine.arguments("estimate_cost")) == 2
    evaluated = [(given["env_id"], given["models"]) for given in engine.arguments("evaluate")]
    assert evaluated == [
        (f"{first.env}@1", ["smollm2", "arith-sft-1@best"]),
        (f"{second.env}@1", ["smollm2", "arith-grpo-1@best"]),
    ]
    assert [given["message"] for given in engine.arguments("chat")] == [
        first.question,
        second.question,
    ]
    stopped = {given["run_id"] for given in engine.arguments("deploy") if "action" in given}
    assert stopped == {"arith-sft-1@best", "arith-grpo-1@best", "smollm2"}
    shown = " ".join(capsys.readouterr().out.split())
    assert "Verdict: better" in shown
    assert "The soup was cold" in shown and "Ines Duarte" in shown
    assert shown.count("/h/report.html") == 2
    assert shown.count("no clear loss") == 2, "of each training"


def test_a_model_that_cannot_be_fetched_ends_the_demo_with_the_reason(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    engine = Engine(monkeypatch)

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("MODEL_NOT_FOUND", "no index here", hint="Add the file by its path.")

    monkeypatch.setattr(library, "add", refuse)
    assert play(home, monkeypatch, model="smollm2") == 1
    shown = capsys.readouterr().out
    assert "no index here" in shown and "Add the file by its path." in shown
    assert "push_env" not in engine.order


def test_a_model_without_a_demo_is_refused_with_those_that_have_one(home: Home):
    with pytest.raises(UserError, match="no demo of 'gpt2'") as caught:
        demo.run_demo(home.root, model="gpt2")
    assert "pebble, smollm2" in caught.value.hint


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_names_settings_and_environments_that_exist(plan: DemoPlan):
    assert [training.algorithm for training in plan.trainings] == ["sft", "grpo"]
    assert plan.trainings[-1].question, "the demo ends with an answer"
    for training in plan.trainings:
        assert (EXAMPLES / training.env / "environment.py").is_file()
        assert resolution.validate(training.algorithm, training.settings) == training.settings
    assert plan.trainings[0].settings.get("max_examples", 0) <= 128


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "no_difference"},
        {"verdict": "inconclusive"},
        {"compared": "inconclusive"},
        {"low": 0.0},
        {"low": -0.1},
    ],
)
def test_anything_less_than_better_leaves_with_one(
    home: Home, monkeypatch: pytest.MonkeyPatch, changes: dict, capsys: pytest.CaptureFixture[str]
):
    Engine(monkeypatch, **changes)
    assert play(home, monkeypatch) == 1
    assert "Verdict: not better" in capsys.readouterr().out


def test_a_run_that_fails_ends_the_demo_with_its_reason(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    engine = Engine(monkeypatch, state="failed")
    assert play(home, monkeypatch) == 1
    assert engine.order.count("submit_train") == 1
    assert "arith-sft-1 failed" in capsys.readouterr().out


def test_a_refused_call_ends_the_demo_with_the_refusal(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    engine = Engine(monkeypatch)

    def refuse(**_: Any) -> None:
        raise UserError("NO_TORCH", "no torch here", hint="honesmith setup")

    engine.submit_train = refuse
    assert play(home, monkeypatch) == 1
    shown = capsys.readouterr().out
    assert "NO_TORCH" in shown and "honesmith setup" in shown and "Traceback" not in shown


def test_json_is_the_only_thing_on_stdout(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Engine(monkeypatch)
    assert play(home, monkeypatch, as_json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["better"] is True and facts["seconds"] >= 0
    assert facts["report"] == "/h/report.html"
    assert set(facts["runs"]) == set(facts["compared"]) == {"sft", "grpo"}


def test_ctrl_c_cancels_what_the_demo_started(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with Store(home) as store:
        mine = store.insert_run(NewRun("demo", "train", "sft", "a@1", "pebble")).run_id
        other = store.insert_run(NewRun("other", "train", "sft", "a@1", "pebble")).run_id
    for run_id in (mine, other):
        home.run(run_id).create()
    monkeypatch.setattr("engine.machine.processes.launcher.reap", lambda home: [])

    async def interrupted(scene: demo.Scene, console: Console) -> None:
        scene.runs.append(mine)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_run_with_client", interrupted)
    assert demo.run_demo(home.root) == 130
    with Store(home) as store:
        assert store.get_run(mine).state == "cancelled"
        assert store.get_run(other).state == "queued"


def test_a_stage_without_a_terminal_says_a_line_per_step():
    out = io.StringIO()
    with Stage("title", Console(file=out, width=200)) as stage:
        step = stage.begin("push_env")
        stage.end(step, "pushed")
        failing = stage.begin("wait_run")
        stage.show_progress(failing, "working", [1.0, 2.0])
        stage.end(failing, "failed", failed=True)
    lines = out.getvalue().splitlines()
    assert lines[0] == "title"
    assert lines[1].startswith("✓ push_env") and "pushed" in lines[1]
    assert lines[-1].startswith("✗ wait_run")


def test_a_stage_on_a_terminal_keeps_its_columns_on_narrow_screens():
    out = io.StringIO()
    console = Console(file=out, width=60, height=20, force_terminal=True, color_system=None)
    with Stage("title", console) as stage:
        stage.end(stage.begin("estimate_cost"), "a long sentence " * 20)
    last = out.getvalue().splitlines()
    assert any(line.startswith("✓ estimate_cost") and len(line) <= 60 for line in last)


def test_sparklines_span_their_values():
    assert sparkline([0, 1]) == "▁█"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([]) == "" and sparkline([float("nan")]) == ""
    assert len(sparkline(list(range(100)), 40)) == 40


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0, "0s"), (59.4, "59s"), (95, "1m35s"), (7260, "2h01m")]
)
def test_durations_are_read_at_a_glance(seconds: float | None, text: str):
    assert duration(seconds) == text
