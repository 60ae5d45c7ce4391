"""Every template and every example loads, passes its audit and is what it says, unchanged."""

import importlib.util
import json
from pathlib import Path

import pytest

from envs.audit.reward_audit import audit
from envs.config.problem import EnvProblem
from envs.config.scaffold import FOLDER, TEMPLATES, copy_template

EXAMPLES = Path(__file__).parents[2] / "envs" / "examples"
KINDS = {
    "single_turn": "single",
    "multi_turn_tool": "multi",
    "judge_graded": "single",
    "sft_only": "sft",
    "arithmetic": "single",
    "guess_number": "multi",
    "tool_call": "multi",
    "reasoning_gym_tasks": "single",
    "booking_fields": "single",
    "review_sentiment": "single",
    "shell_agent": "command",
    "llm_agent": "command",
    "harbor_tasks": "command",
}
FEW_TASKS = ("harbor_tasks",)  # a folder each, written by hand


def every_environment() -> list[Path]:
    folders = [*FOLDER.iterdir(), *EXAMPLES.iterdir()]
    return sorted(folder for folder in folders if folder.is_dir() and folder.name[0] not in "_.")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("folder", every_environment(), ids=lambda f: f"{f.parent.name}/{f.name}")
def test_it_loads_and_passes_its_audit(folder: Path, start):
    needed = folder / "requirements.txt"
    # A command alone needs its packages: its tasks load without them.
    is_command = KINDS[folder.name] == "command"
    if needed.exists() and not is_command and not importlib.util.find_spec("reasoning_gym"):
        pytest.skip(f"not installed: {needed.read_text().strip()}")
    process = start(folder)
    described = process.describe()
    assert described["kind"] == KINDS[folder.name]
    rows = process.tasks()
    assert len(rows) >= (3 if folder.name in FEW_TASKS else 100)
    second = start(folder)

    def fresh():
        second.close()
        second.describe()
        return second

    found = audit(process, rows, described["kind"], budget_s=1.5, fresh=fresh)
    if described["kind"] == "command":  # it earns its own rewards: nothing can be probed
        assert (found["verdict"], found["rows_scored"]) == ("warn", 0)
        return
    assert found["verdict"] == "ok", found["headline"]
    assert found["gold_failing"] == [] and found["problems"] == []
    if described["scored"]:
        gold = next(line for line in found["probes"] if line["probe"] == "gold")
        assert gold["mean"] == 1.0
        again = found["fresh_process"]
        assert again["scored"] == again["asked"] >= 12 and again["differing"] == 0


@pytest.mark.parametrize("name", [*TEMPLATES, "multi-turn-tool"])
def test_a_template_is_copied_whole(name: str, tmp_path: Path):
    written = copy_template(name, tmp_path / "mine" / "env")
    assert tmp_path / "mine" / "env" / "environment.py" in written
    source = FOLDER / name.replace("-", "_")
    for path in written:
        relative = path.relative_to(tmp_path / "mine" / "env")
        assert path.read_bytes() == (source / relative).read_bytes()
    named = {path.name for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path.name for path in written} == named


def test_every_template_is_listed():
    assert {path.name for path in FOLDER.iterdir() if path.name[0] not in "_."} == set(TEMPLATES)


def test_an_unknown_template_is_met_with_a_suggestion(tmp_path: Path):
    with pytest.raises(EnvProblem, match="did you mean single_turn"):
        copy_template("singel_turn", tmp_path / "x")


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(EnvProblem, match="is in use"):
        copy_template("sft_only", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.timeout(30)
@pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="not installed")
def test_reasoning_gym_tasks_are_scored_by_the_package_itself(start):
    process = start(EXAMPLES / "reasoning_gym_tasks")
    rows = process.tasks()
    families = {row["metadata"]["family"] for row in rows}
    assert families == {"chain_sum", "gcd", "letter_counting", "spell_backward"}
    assert len(rows) == 600
    sums = [row for row in rows if row["metadata"]["family"] == "chain_sum"]
    for row in sums[:5]:
        left, sign, right = row["metadata"]["entry"]["metadata"]["expression"].split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        right_score = process.score(row, f" {value}\n")
        assert (right_score["reward"], right_score["success"]) == (1.0, True)
        assert process.score(row, str(value + 1))["reward"] < 0.5


def test_the_judge_template_asks_its_judge_only_where_one_is_set(start, tmp_path: Path):
    copy_template("judge_graded", tmp_path / "env")
    settings = (tmp_path / "env" / "environment.toml").read_text()
    (tmp_path / "env" / "environment.toml").write_text(
        settings.replace('# judge_url = "http://localhost:8000/v1"', 'judge_url = "http://[::1]:9"')
    )
    process = start(tmp_path / "env")
    row = process.tasks()[0]
    gold = row["answer"][0]["content"]
    asked = process.score(row, gold)
    assert "judge:" in asked["error"]
    assert process.score(row, "No. " + gold)["error"] is None
    plain = start(FOLDER / "judge_graded").score(row, gold)
    assert (plain["reward"], plain["error"]) == (1.0, None)
    assert set(plain["metrics"]) == {"one_sentence", "who_and_where", "deed", "short"}


def test_the_rows_of_the_sft_template_are_valid_json():
    lines = (FOLDER / "sft_only" / "datasets" / "orders.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    answers = [row.get("completion") or row["messages"][-1]["content"] for row in rows]
    assert all(set(json.loads(answer)) == {"who", "count", "item"} for answer in answers)


@pytest.mark.parametrize("name", ["single_turn", "multi_turn_tool"])
def test_a_template_that_grows_its_rows_holds_out_enough_to_see_ten_points(name: str, start):
    tasks = start(FOLDER / name).tasks()
    assert len(tasks) // 5 >= 200 and len({task["id"] for task in tasks}) == len(tasks)
