"""PriorSkills skills: what pebble could do before is asked again after, and forgetting is seen."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from as_json import kept_skills
from loops import ROWS_ENVIRONMENT, go, make_run, push, save_random_model
from run_configs import train_config

from engine.cost.batteries import batteries
from engine.evidence.stats.results import load_rows
from engine.home.run_dir import Home
from engine.records.run_config import SFTConfig
from engine.skills import pebble as skills
from engine.skills.batteries import SKILLS, TASKS_PER_SKILL, battery_of, pebble_tasks
from engine.worker.evaluation.prior_skills import batteries_of, family_of


def lessons(replay: float, count: int = 200, heldout: int = 40) -> list[dict[str, Any]]:
    """Rows of a skill pebble never saw, and `replay` times as many of what it knows."""
    rng = random.Random(1)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        sample = skills.ends(rng)
        prompt = sample.messages[0]["content"]
        split = "heldout" if len(rows) < heldout else "train"
        rows.setdefault(prompt, {"prompt": prompt, "answer": sample.answer, "split": split})
    for _ in range(int(replay * count)):
        sample = skills.draw(rng, rng.choice(SKILLS), (), measured=True)
        prompt = sample.messages[0]["content"]
        rows.setdefault(prompt, {"prompt": prompt, "answer": sample.answer, "split": "train"})
    return [{"id": f"row-{at}", **row} for at, row in enumerate(rows.values())]


@pytest.mark.worker
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("replay", "word"), [(0.0, "forgotten"), (2.0, "kept")])
def test_learning_one_skill_costs_the_others_unless_they_are_replayed(
    home: Home, tmp_path: Path, replay: float, word: str
) -> None:
    folder = tmp_path / "ends"
    folder.mkdir()
    (folder / "rows.json").write_text(json.dumps(lessons(replay)))
    settings = {"steps": 30, "learning_rate": 3e-3, "batch_size": 24}
    settings |= {"eval_every": 30, "eval_rows": 40, "keep": 0, "skill_rows": 48}
    result = go(make_run(home, push(home, folder, ROWS_ENVIRONMENT, "ends"), "sft", settings))
    kept = result["evidence"]["kept_skills"]
    assert result["verdict"] == "better", "the new skill is learned either way"
    assert kept["verdict"] == word, kept["summary"]
    (battery,) = kept["batteries"]
    assert battery["battery"] == "pebble skills" and battery["before"] > 0.8
    forgot = [text for text in result["evidence"]["warnings"] if text.startswith("Forgotten")]
    assert bool(forgot) == (word == "forgotten")
    assert ("reverse 1.00 to" in result["summary"]) == (word == "forgotten")


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


# A short run that is asked as many questions as one whose settings say nothing.
SETTINGS = {"steps": 2, "eval_rows": 8, "eval_every": 2, "skill_rows": 200}
KEEP = """
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    def tasks(self):
        return [Task(f"{a}+{b}", f"What is {a} + {b}?", answer=str(a + b),
                     metadata={"family": "small" if a + b < 8 else "large"})
                for a in range(10) for b in range(10)]

    def score(self, task, completion):
        return Score(float(completion.strip() == task.answer))

def load_environment():
    return Sums()
"""


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_an_environment_named_keep_is_asked_too(home: Home, env_id: str, tmp_path: Path) -> None:
    keep = push(home, tmp_path / "keep", KEEP, "keep")
    run = make_run(home, env_id, "sft", SETTINGS)
    go(run)
    for when in ("before", "after"):
        asked = [row["battery"] for row in load_rows(run.kept(when))]
        assert asked.count("pebble skills") == len(SKILLS) * TASKS_PER_SKILL
        heldout = asked.count(keep)
        assert 0 < heldout <= 200
    found = {b["battery"]: b for b in kept_skills(run)["batteries"]}
    assert found[keep]["n"] == heldout and found[keep]["metric"] == "reward"
    assert {skill["skill"] for skill in found[keep]["skills"]} == {"small", "large"}


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_battery_that_fails_costs_the_run_nothing(
    home: Home, env_id: str, tmp_path: Path
) -> None:
    keep = push(home, tmp_path / "keep", KEEP, "keep")
    source = home.env("keep", keep.partition("@")[2]) / "source" / "environment.py"
    source.chmod(0o600)
    source.write_text("raise RuntimeError('gone')")
    run = make_run(home, env_id, "sft", SETTINGS)
    assert go(run)["verdict"] in ("better", "worse", "no_difference", "inconclusive")
    skipped = [row for row in load_rows(run.events) if row["event"] == "kept_skipped"]
    assert skipped and keep in skipped[0]["message"]
    assert {b["battery"] for b in kept_skills(run)["batteries"]} == {"pebble skills"}


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_model_of_another_base_is_asked_questions_in_english(
    home: Home, env_id: str, tmp_path: Path
) -> None:
    other = save_random_model(tmp_path / "other")
    # A rate at which random weights say no right word by chance after two steps.
    settings = SETTINGS | {"learning_rate": 1e-4}
    run = make_run(home, env_id, "sft", settings, model=str(other))
    result = go(run)
    before, after = load_rows(run.kept("before")), load_rows(run.kept("after"))
    assert {row["battery"] for row in before} == {"language skills"}
    assert [row["task"] for row in before] == [row["task"] for row in after]
    assert [row["task"] for row in before] == [task["id"] for task in battery_of("any other").tasks]
    # A model of chance says no right word.
    assert all(row["error"] is None and row["success"] is False for row in before)
    (battery,) = result["evidence"]["kept_skills"]["batteries"]
    assert battery["verdict"] == "kept" and battery["n"] == len(before)
    families = {task["family"] for task in battery_of("any other").tasks}
    assert {skill["skill"] for skill in battery["skills"]} == families
    assert "nothing to lose" in kept_skills(run)["summary"]


@pytest.mark.worker
@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [0, 22])
def test_a_run_asks_as_many_questions_of_a_battery_as_it_was_told(
    home: Home, env_id: str, count: int
) -> None:
    settings = {"steps": 1, "eval_rows": 4, "eval_every": 1, "skill_rows": count}
    run = make_run(home, env_id, "sft", settings)
    result = go(run)
    asked = load_rows(run.kept("before")) if run.kept("before").exists() else []
    assert Counter(row["family"] for row in asked) == (dict.fromkeys(SKILLS, 2) if count else {})
    assert ("kept_skills" in result["evidence"]) == (count > 0)


def test_every_run_is_asked_the_same_tasks() -> None:
    assert pebble_tasks() == pebble_tasks()
    assert len({task["id"] for task in pebble_tasks()}) == len(SKILLS) * TASKS_PER_SKILL


PEBBLE = {"ref": "pebble", "path": "/nowhere/pebble"}


@pytest.mark.parametrize("most", [0, 5, 22, 1000])
def test_skill_rows_trims_the_questions_evenly_over_the_skills(home: Home, most: int) -> None:
    config = SFTConfig.model_validate(train_config("a-sft-1", algorithm="sft", base=PEBBLE))
    config = config.model_copy(
        update={"settings": config.settings.model_copy(update={"skill_rows": most})}
    )
    asked = [task["family"] for battery in batteries_of(config, home) for task in battery.tasks]
    assert len(asked) == min(len(SKILLS) * TASKS_PER_SKILL, most)
    assert len(set(asked)) == min(len(SKILLS), len(asked))
    if most == 22:
        assert all(asked.count(skill) == 2 for skill in SKILLS)


def test_the_estimate_counts_as_many_questions_as_are_asked(home: Home) -> None:
    whole, trimmed = batteries(home, None, 200), batteries(home, None, 5)
    assert whole[0].tasks == len(SKILLS) * TASKS_PER_SKILL and trimmed[0].tasks == 5


def test_a_task_is_of_the_family_or_the_skill_that_its_metadata_names() -> None:
    assert family_of({"metadata": {"family": "small", "skill": "sums"}}) == "small"
    assert family_of({"metadata": {"skill": "sums"}}) == "sums"
    assert family_of({"metadata": None}) == family_of({}) == ""
