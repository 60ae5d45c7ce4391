"""`keep`: what the start could do is trained beside the new rows, and stays."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from as_json import kept_skills
from loops import ROWS_ENVIRONMENT, go, make_run, push, save_random_model

from engine.core.split import prompt_key
from engine.evidence.stats.results import load_rows
from engine.home.run_dir import Home, RunDir
from engine.records.lines.event import read_events
from engine.records.lines.replayed_row import ReplayedRow, read_replayed
from engine.records.manifest import ReplayUsed, read_manifest
from engine.skills import pebble
from engine.skills.batteries import pebble_tasks, practice_of, says_answer
from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.evaluation.replay import Replay, balanced
from engine.worker.evaluation.replay_rows import FEWEST_ASKED

SETTINGS: dict[str, Any] = {
    "steps": 30,
    "learning_rate": 3e-3,
    "batch_size": 24,
    "eval_every": 30,
    "eval_rows": 40,
    "skill_rows": 48,
}


def push_ends(
    home: Home,
    folder: Path,
    count: int = 200,
    heldout: int = 40,
    also: dict[str, str] | None = None,
) -> str:
    """An environment of a skill that pebble never saw; `also` are further prompts to train on, with
    their answers."""
    rng = random.Random(1)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        sample = pebble.ends(rng)
        prompt = sample.messages[0]["content"]
        split = "heldout" if len(rows) < heldout else "train"
        rows.setdefault(prompt, {"prompt": prompt, "answer": sample.answer, "split": split})
    for prompt, answer in (also or {}).items():
        rows[prompt] = {"prompt": prompt, "answer": answer, "split": "train"}
    listed = [{"id": f"row-{at}", **row} for at, row in enumerate(rows.values())]
    folder.mkdir()
    (folder / "rows.json").write_text(json.dumps(listed))
    return push(home, folder, ROWS_ENVIRONMENT, "ends")


def trained_with(home: Home, env_id: str, run_id: str, **settings: Any) -> dict[str, Any]:
    """What a run with these settings says of kept skills, with its folder."""
    run = make_run(home, env_id, "sft", SETTINGS | settings, run_id=run_id)
    result = go(run)
    return {"run": run, "result": result, **result["evidence"]["kept_skills"]}


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_what_the_start_answers_rightly_is_replayed_and_less_is_lost(
    home: Home, tmp_path: Path
) -> None:
    env_id = push_ends(home, tmp_path / "ends")
    plain = trained_with(home, env_id, "plain", keep=0)
    kept = trained_with(home, env_id, "kept", keep=0.35)
    assert plain["verdict"] == "forgotten" and "replayed" not in plain
    (without,), (battery,) = plain["batteries"], kept["batteries"]
    assert battery["after"] > without["after"] + 0.15
    assert kept["result"]["verdict"] == "better"
    # What was replayed: right answers of the start, to questions that nobody asks.
    run: RunDir = kept["run"]
    rows = read_replayed(run.replayed)
    questions = {task["id"]: task for task in practice_of("pebble").tasks}
    assert all(says_answer(questions[row.task], row.messages[-1]["content"]) for row in rows)
    asked = {prompt_key(task["prompt"]) for task in pebble_tasks()}
    assert not asked & {prompt_key(row.messages[:1]) for row in rows}
    assert len({row.task for row in rows}) == len(rows) < len(questions)
    # As many as the run uses, 13 a step; a few more where the last questions were all right.
    assert 30 * 13 <= len(rows) < 30 * 13 + FEWEST_ASKED
    asked_count = read_manifest(run.manifest).replayed.questions
    assert len(rows) < asked_count < len(questions)
    # It stands in the manifest, in the events, and in what is said of the run.
    used = ReplayUsed(share=0.35, source="pebble skills", rows=len(rows), questions=asked_count)
    assert read_manifest(run.manifest).replayed == used
    assert kept["replayed"] == used.to_json()
    assert [event.message for event in read_events(run.events) if event.event == "replayed"] == [
        used.sentence
    ]
    assert kept["summary"].endswith(used.sentence)
    assert used.sentence in kept["result"]["summary"] or kept["verdict"] == "forgotten"


OTHER = """
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    def tasks(self):
        asked = [Task(f"asked-{a}", f"What is {a} + {a}?", answer=str(2 * a), split="heldout")
                 for a in range(1, 5)]
        trained = [Task(f"row-{a}", f"What is {a} + {a}?", answer=str(2 * a), split="train")
                   for a in range(1, 10)]
        return asked + trained

    def score(self, task, completion):
        return Score(float(completion.strip() == task.answer_text))

def load_environment():
    return Sums()
"""


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_rows_of_a_named_environment_are_replayed_but_none_that_is_asked_or_contradicts(
    home: Home, tmp_path: Path
) -> None:
    # The task teaches another answer to one of its questions, and the same to another.
    taught = {"What is 9 + 9?": "nine", "What is 8 + 8?": "16"}
    env_id = push_ends(home, tmp_path / "ends", also=taught)
    # Its held-out tasks are asked, and pebble's own battery asks one of its train rows.
    keep = push(home, tmp_path / "keep", OTHER, "keep")
    assert "What is 7 + 7?" in {task["prompt"][0]["content"] for task in pebble_tasks()}
    few = {"steps": 2, "eval_every": 2, "eval_rows": 8, "skill_rows": 66}
    kept = trained_with(home, env_id, "kept", keep=0.2, keep_env=keep, **few)
    rows = read_replayed(kept["run"].replayed)
    named = [row for row in rows if row.source == keep]
    assert {row.task for row in named} == {"row-5", "row-6", "row-8"}
    # Beside them practice questions, as without it.
    assert {row.source for row in rows} == {keep, "pebble skills"}
    of_named = {"share": 0.2, "source": keep, "rows": 3, "questions": None, "beside": None}
    assert kept["replayed"]["beside"] == {**of_named, "opposed": 1}
    assert "(1 left out that contradict the task's own rows)" in kept["summary"]
    assert kept["replayed"]["source"] == "pebble skills"
    assert kept["replayed"]["rows"] == len(rows) - 3


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_run_with_nothing_to_replay_fails_before_the_first_step(
    home: Home, tmp_path: Path
) -> None:
    env_id = push_ends(home, tmp_path / "ends")
    run = make_run(home, env_id, "sft", SETTINGS | {"keep": 0.2, "keep_env": push_asked(home)})
    with pytest.raises(WorkerFailure, match="no train row with an answer that no exam asks"):
        go(run)
    assert not run.checkpoints.exists() or not list(run.checkpoints.iterdir())


FEW: dict[str, Any] = {"eval_every": 11, "eval_rows": 4, "batch_size": 4, "skill_rows": 8}


@pytest.mark.long
@pytest.mark.worker
@pytest.mark.timeout(60)
def test_the_models_own_right_answers_to_an_environment_are_replayed(
    home: Home, tmp_path: Path
) -> None:
    env_id = push_ends(home, tmp_path / "ends")
    # It scores 7 + 7 alone as wrong, whatever is said.
    source = OTHER.replace("completion.strip() == task.answer_text", "task.id != 'row-7'")
    keep = push(home, tmp_path / "keep", source, "others")
    asked = {"steps": 1, "keep": 0.2, "keep_env": keep, "keep_answers": "own"}
    kept = trained_with(home, env_id, "kept", **{**FEW, **asked})
    rows = [row for row in read_replayed(kept["run"].replayed) if row.source == keep]
    # All 9 fit into one round of questions; some may be those of pebble's own battery.
    assert rows and "row-7" not in {row.task for row in rows}
    for row in rows:  # what pebble said, with its end token, and nothing of the reference
        assert row.messages[-1]["role"] == "assistant" and row.messages[-1]["content"]
        assert 0 < sum(row.loss_mask) < len(row.ids) == len(row.loss_mask)
    of_named = kept["replayed"]["beside"]
    assert of_named["source"] == keep and of_named["questions"] >= len(rows)


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_model_that_can_do_nothing_trains_without_replay_unless_somebody_asked_for_it(
    home: Home, tmp_path: Path
) -> None:
    env_id = push_ends(home, tmp_path / "ends")
    other = str(save_random_model(tmp_path / "other"))
    few = {"steps": 11, **FEW}
    run = make_run(home, env_id, "sft", few | {"keep": None}, model=other, run_id="plain")
    go(run)
    (event,) = [each for each in read_events(run.events) if each.event == "nothing_replayed"]
    assert event.message.startswith("keep = 0.35 replays nothing: the starting model answers none")
    assert read_manifest(run.manifest).replayed is None and not run.replayed.exists()
    chosen = make_run(home, env_id, "sft", {**few, "keep": 0.2}, model=other, run_id="chosen")
    with pytest.raises(WorkerFailure, match="answers none of 336 questions"):
        go(chosen)


@pytest.mark.worker
@pytest.mark.timeout(60)
@pytest.mark.long
def test_grpo_loses_fewer_skills_where_it_replays_them(home: Home, tmp_path: Path) -> None:
    """It is trained to answer at length, whatever the question: so it loses what was there."""
    source = OTHER.replace("completion.strip() == task.answer_text", "len(completion) / 40")
    env_id = push(home, tmp_path / "short", source, "short")
    settings = {"steps": 12, "prompts_per_step": 5, "group_size": 6, "max_tokens": 12}
    settings |= {"learning_rate": 3e-3, "eval_every": 12, "eval_rows": 4, "skill_rows": 44}
    kept, results = {}, {}
    for keep in (0.0, 0.3):
        run = make_run(home, env_id, "grpo", settings | {"keep": keep}, run_id=f"grpo-{keep:g}")
        results[keep] = go(run)
        kept[keep] = kept_skills(run)
    (without,), (battery,) = kept[0.0]["batteries"], kept[0.3]["batteries"]
    assert battery["after"] > without["after"] + 0.15
    assert kept[0.3]["replayed"]["share"] == 0.3 and "replayed" not in kept[0.0]
    _start, *lines = load_rows(home.run("grpo-0.3").metrics)
    assert len(lines) == 12 and all(line["replay_loss"] > 0 for line in lines)
    _start, *lines = load_rows(home.run("grpo-0").metrics)
    assert {line["replay_loss"] for line in lines} == {None}


def test_rows_of_a_smaller_source_come_as_often_as_those_of_a_larger() -> None:
    def row(source: str, number: int) -> ReplayedRow:
        return ReplayedRow(
            source=source, task=f"{number}", messages=[], ids=[number, 1], loss_mask=[0, 1]
        )

    trained = balanced([*(row("a", at) for at in range(6)), row("b", 7), row("b", 8)])
    assert sorted(each.ids[0] for each in trained) == [0, 1, 2, 3, 4, 5, 7, 7, 7, 8, 8, 8]


def push_asked(home: Home) -> str:
    """An environment named keep of which every row is asked."""
    source = OTHER.replace("range(1, 10)", "range(1, 5)")
    return push(home, home.root.parent / "asked", source, "keep")


def test_the_share_counts_replayed_rows_among_all_rows_of_a_batch() -> None:
    rows = [Row([0, at], [0, 1]) for at in range(5)]

    def replay(share: float) -> Replay:
        return Replay(rows, share, 7, ReplayUsed(share=share, source="s", rows=5), batch_rows=6)

    # 6 of 30, 32 of 64, 2 of 8; never none.
    assert [
        replay(0.2).replayed_count(24),
        replay(0.5).replayed_count(32),
        replay(0.2).replayed_count(6),
    ] == [6, 32, 2]
    assert replay(0.01).replayed_count(3) == 1
    # Every row once before any comes again: 5 rows, 2 a step.
    steps = [replay(0.25).of_full_step(step) for step in range(1, 6)]
    assert all(len(step) == 2 for step in steps)
    taken = [row.ids[1] for step in steps for row in step]
    assert sorted(taken[:5]) == sorted(taken[5:]) == [0, 1, 2, 3, 4]
    # A resumed run takes the same rows, and a smaller last batch fewer.
    assert replay(0.25).of_step(3, 6, 6) == steps[2]
    assert replay(0.25).of_step(3, 3, 6) == steps[2][:1]
