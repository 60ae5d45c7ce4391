"""A sealed exam shows a verdict and nothing of its tasks, by whichever tool or address one asks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from answered import answer, evaluation, push, training
from mcp import Client
from typer.testing import CliRunner

from engine.core.errors import UserError
from engine.environments import registry, versions
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.submit import contamination
from engine.runs.submit.run_folder import RunFiles
from mcp_server.cli.main import app
from mcp_server.protocol.app import build_server

SECRET = "zqx"  # in every prompt, answer, id and piece of metadata of the exam
EXAM = f"""
from envs import Score, SingleTurnEnv, Task

class Exam(SingleTurnEnv):
    def tasks(self):
        return [
            Task(f"{SECRET}-{{n}}", f"{SECRET} {{n}}?", answer=f"{SECRET}{{n}}", split="heldout",
                 metadata={{"kind": "{SECRET}"}})
            for n in range(40)
        ]

    def score(self, task, completion):
        return Score(float(completion == task.answer), success=completion == task.answer)

def load_environment():
    return Exam()
"""


@pytest.fixture
def exam(home: Home, tmp_path: Path) -> str:
    env_id = push(home, tmp_path / "exam", EXAM, name="exam")
    versions.seal(home, env_id, looks=4)
    return env_id


def rows_of(right: int) -> list[dict]:
    """Answers to the exam, of which so many are right."""
    tasks = [f"{SECRET}-{n}" for n in range(40)]
    return [answer(task, f"{SECRET} said", float(n < right)) for n, task in enumerate(tasks)]


@pytest.fixture
def judged(home: Home, exam: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A finished evaluation of two models on the exam; its id."""
    find = registry.find_env
    monkeypatch.setattr(registry, "find_env", lambda h, r: find(h, r, sealed=True))
    run = evaluation(home, exam, {"pebble": rows_of(5), "taught": rows_of(35)}, attempts=1)
    monkeypatch.undo()
    return run.id


async def asked(home: Home, tool: str, **arguments: object) -> str:
    """The text of a tool's result or error."""
    async with Client(build_server(home, [home.envs])) as client:
        result = await client.call_tool(tool, arguments)
    return "".join(getattr(part, "text", "") for part in result.content)


async def test_the_models_are_told_apart_by_a_verdict(home: Home, judged: str):
    reply = json.loads(await asked(home, "compare_runs", ids=[judged]))
    assert reply["verdict"] == "better" and reply["comparisons"]
    assert reply["flips"]["gained"] == reply["flips"]["lost"] == []
    assert SECRET not in json.dumps(reply)


def calls_about(exam: str, run_id: str, folder: Path) -> list[tuple[str, dict[str, object]]]:
    """Calls of tools that would show something of an exam's tasks, if it were not sealed."""
    addresses = [f"env://{exam}/source", f"run://{run_id}/report", f"run://{run_id}/card"]
    return [
        *(("read_playbook", {"section": address}) for address in addresses),
        *(("read_logs", {"run_id": run_id, "view": view}) for view in ("events", "console")),
        *(
            ("read_rollouts", {"run_id": run_id, "pick": pick})
            for pick in ("worst", "changed", "group")
        ),
        ("diagnose", {"run_id": run_id}),
        ("curate", {"source_ids": [run_id], "name": "stolen"}),
        ("compare_runs", {"ids": [run_id], "group_by": "kind"}),
        ("dry_run", {"env_id": exam, "algorithm": "sft"}),
        ("estimate_cost", {"env_id": exam, "algorithm": "grpo"}),
        ("submit_train", {"env_id": exam, "algorithm": "grpo"}),
        ("evaluate", {"env_id": exam, "regrade": run_id}),
        ("evaluate", {"env_id": exam, "models": ["pebble"], "rows": 40, "perturb": ["all"]}),
        ("evaluate", {"env_id": exam, "models": ["pebble"], "rows": 39}),
        ("evaluate", {"env_id": exam, "models": ["openai:away"], "rows": 40}),
        ("push_env", {"path": str(folder / "source"), "name": "opened"}),
    ]


@pytest.mark.timeout(60)
async def test_no_tool_shows_anything_of_its_tasks(home: Home, exam: str, judged: str):
    folder = home.env(*exam.split("@"))
    away = 'url = "https://away.example/v1"\nmodel = "big"\n'
    home.config_file.write_text(f"[endpoints.away]\n{away}")
    for tool, arguments in calls_about(exam, judged, folder):
        text = await asked(home, tool, **arguments)
        refused = "ENV_SEALED" in text or "PATH_OUTSIDE_ROOTS" in text
        assert refused or '"ready":false' in text, (tool, arguments, text)
        assert SECRET not in text, (tool, arguments)
    for tool, arguments in (
        ("get_status", {}),
        ("wait_run", {"run_id": judged, "timeout_s": 0}),
        ("read_logs", {"run_id": judged}),
    ):
        assert SECRET not in await asked(home, tool, **arguments), tool


def test_no_command_shows_anything_of_its_tasks(home: Home, exam: str, judged: str, tmp_path: Path):
    for line in (
        f"env pull {exam} {tmp_path / 'pulled'}",
        f"env diff {exam} {exam}",
        f"env audit {exam}",
        f"report {judged}",
        f"results {judged} --csv {tmp_path / 'table.csv'}",
        f"evaluate {exam} pebble --rows 40 --task-indices 3",
        f"results {judged} --traces {tmp_path / 'traces.jsonl'}",
    ):
        result = CliRunner().invoke(app, [*line.split(), "--home", str(home.root)])
        assert result.exit_code == 2 and "ENV_SEALED" in result.output, (line, result.output)
        assert SECRET not in result.output
    assert not [path for path in tmp_path.iterdir() if path.name in ("pulled", "table.csv")]


def refusal(act: Callable[[], object]) -> UserError:
    with pytest.raises(UserError) as caught:
        act()
    return caught.value


def queue(home: Home, exam: str, models: list[str]) -> str:
    """Queue an evaluation as a submit does, without starting it; its id."""
    folder = home.env(*exam.split("@"))
    entries = [{"ref": ref, "base_path": "/", "adapter": None} for ref in models]
    config = {"kind": "evaluate", "env_id": exam, "env_dir": str(folder), "models": entries}
    new = NewRun("exam-eval", "evaluate", "evaluate", exam, ", ".join(models))
    with Store(home) as store:
        return store.insert_run(new, RunFiles(config).writer(home)).run_id


def test_a_look_is_one_model_in_an_evaluation_and_they_run_out(home: Home, exam: str):
    queue(home, exam, ["pebble"])
    cancelled = queue(home, exam, ["pebble", "other"])
    with Store(home) as store:
        store.set_state(cancelled, "cancelled", only_from={"queued"})
    error = refusal(lambda: queue(home, exam, ["pebble", "other"]))
    assert error.code == "ENV_SEALED" and "3 are used" in error.message
    queue(home, exam, ["pebble"])
    assert refusal(lambda: queue(home, exam, ["pebble"])).code == "ENV_SEALED"


def test_a_seal_says_what_could_be_read_before_and_does_not_change(home: Home, tmp_path: Path):
    env_id = push(home, tmp_path / "exam", EXAM, name="exam")
    training(home, env_id, evals={10: [answer(f"{SECRET}-1", "x", 1.0)]})
    reply = versions.seal(home, env_id, looks=2)
    assert reply.warnings and "before it was sealed" in reply.warnings[0]
    assert refusal(lambda: versions.seal(home, env_id, looks=9)).code == "RUN_STATE"
    assert refusal(lambda: versions.seal(home, env_id, looks=0)).code == "BAD_ARGUMENT"


def test_pushing_a_sealed_folder_again_gives_the_sealed_version(
    home: Home, exam: str, tmp_path: Path
):
    assert push(home, tmp_path / "exam", EXAM, name="exam") == exam
    assert refusal(lambda: registry.find_env(home, exam)).code == "ENV_SEALED"


def test_a_seal_that_cannot_be_read_still_seals(home: Home, exam: str):
    (home.env(*exam.split("@")) / "seal.json").write_text("{")
    with pytest.raises(UserError):
        registry.find_env(home, exam)


def test_rows_that_hold_its_tasks_are_counted_and_not_named(home: Home, exam: str, tmp_path: Path):
    copied = EXAM.replace('split="heldout"', 'split="train"').replace('f"zqx-{n}"', 'f"row-{n}"')
    trained_on = push(home, tmp_path / "copy", copied, name="copy")
    run = training(home, trained_on)
    record = registry.find_env(home, exam, sealed=True)
    report = contamination.compare_evaluation(home, record, [run.id], "heldout")
    assert report is not None and report.verdict == "leak"
    assert report.warnings[0].startswith("contamination: 40 of 40 held-out tasks overlap")
    assert SECRET not in report.warnings[0] and "row-" not in report.warnings[0]
    assert report.sources[0]["examples"] == []
