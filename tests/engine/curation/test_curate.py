"""Curated datasets: what is kept and dropped and why, what is saved, what never enters."""

import json
from pathlib import Path
from typing import Any

import pytest
from answered import SUMS, answer, evaluation, push, training

from engine.core.errors import UserError
from engine.curation import curate as curation
from engine.curation.curated import Choices
from engine.environments.pairs import pair_of
from engine.environments.registry import find_env, read_tasks
from engine.evidence.overlap import overlap
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.owners import Share, Viewer

pytestmark = pytest.mark.timeout(20)

MIXED = [
    answer("1+1", "2", 1.0, 0),
    answer("1+1", "It is 2", 0.0, 1),
    answer("1+2", "3", 1.0, 0),
    answer("1+2", "3", 1.0, 1),
    answer("1+3", "5", 0.0, 0),
    answer("1+3", "6", 0.0, 1),
    answer("9+1", "10", 1.0, 0),
    answer("9+1", "11", 0.0, 1),
    answer("2+2", "4", 1.0, 0, stop_reason="length"),
    answer("2+2", "", 0.0, 1, error="score() raised"),
]


def curate(
    home: Home, source_ids: list[str], name: str, preview: bool = True, **choices: Any
) -> dict[str, Any]:
    return curation.curate(home, name, Choices(source_ids, **choices), preview).to_json()


@pytest.fixture
def env(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


def rows_of(home: Home, result: dict[str, Any], split: str = "train") -> list[dict[str, Any]]:
    return read_tasks(find_env(home, result["env_id"]), split)


def test_every_attempt_is_kept_or_dropped_for_a_reason_that_is_counted(home: Home, env: str):
    run = evaluation(home, env, {"pebble": MIXED})
    result = curate(home, [run.id], "sums-best", where="0 < avg < 1 or n_error > 0")
    assert result["kept"] == result["tasks"] == 1 and result["attempts"] == 10
    dropped = {"heldout": 2, "error": 1, "where": 4, "not_correct": 1, "truncated": 1}
    assert result["dropped"] == dropped
    assert result["examples"][0]["task"] == "1+1" and result["examples"][0]["answer"] == "2"
    assert result["dropped_examples"]["heldout"]["task"] == "9+1"
    assert result["env_id"] == "" and "Preview" in result["summary"]
    assert result["next"][0]["arguments"]["preview"] is False


def test_a_preview_saves_nothing_and_the_call_it_suggests_saves_what_it_showed(
    home: Home, env: str
):
    run = evaluation(home, env, {"pebble": MIXED})
    seen = curate(home, [run.id], "sums-best")
    assert not (home.envs / "sums-best").exists()
    (call,) = seen["next"]
    saved = curate(home, **call["arguments"])
    assert saved["kept"] == seen["kept"] == 2
    assert find_env(home, "sums-best").env_id == saved["env_id"]
    assert saved["next"] == [
        {
            "tool": "submit_train",
            "arguments": {"env_id": saved["env_id"], "algorithm": "sft", "model": "pebble"},
        }
    ]


def test_a_saved_row_is_the_answer_with_its_origin_and_the_exam_is_that_of_the_source(
    home: Home, env: str
):
    run = evaluation(home, env, {"pebble": MIXED})
    saved = curate(home, [run.id], "sums-best", preview=False)
    first, _ = rows_of(home, saved)
    assert first["id"] == "1+1#1" and first["gold"][-1]["content"] == "2"
    assert first["prompt"] == MIXED[0]["prompt"]
    played = {"run": run.id, "model": "pebble", "step": 0, "attempt": 0, "reward": 1.0}
    assert first["metadata"]["origin"] == {"env_id": env, "task": "1+1"} | played
    exam = read_tasks(find_env(home, env), "heldout")
    kept = rows_of(home, saved, "heldout")
    for name in ("id", "prompt", "answer", "gold"):
        assert [row[name] for row in kept] == [row[name] for row in exam]
    record = find_env(home, saved["env_id"])
    card = json.loads((record.source / "curation.json").read_text())
    assert card["sources"][0]["id"] == run.id and card["select"] == "correct"
    assert len(card["sources"][0]["files"]["evals/model_0.jsonl"]) == 64
    assert record.kind == "sft" and record.contamination["verdict"] == "clean"


def test_the_same_call_gives_the_same_version_whatever_the_order_of_the_sources(
    home: Home, env: str
):
    one = evaluation(home, env, {"pebble": MIXED[:4]})
    two = evaluation(home, env, {"pebble": MIXED[4:] + MIXED[:1]})
    a = curate(home, [one.id, two.id], "sums-best", select="all", preview=False)
    b = curate(home, [two.id, one.id], "sums-best", select="all", preview=False)
    assert [r["id"] for r in rows_of(home, a)] == [r["id"] for r in rows_of(home, b)]
    assert (
        curate(home, [one.id, two.id], "sums-best", select="all", preview=False)["env_id"]
        == (a["env_id"])
    )


def test_two_environments_with_equal_task_ids_stay_apart(home: Home, env: str, tmp_path: Path):
    differences = SUMS.replace(" + {b}?", " minus {b}?").replace("{a + b}", "{a - b}")
    other = push(home, tmp_path / "other", differences, "minus")
    asked = [{"role": "user", "content": "What is 1 minus 1?"}]
    one = evaluation(
        home, env, {"pebble": [answer("1+1", "2", 1.0, 0), answer("1+1", "2", 1.0, 1)]}
    )
    two = evaluation(
        home,
        other,
        {
            "pebble": [
                answer("1+1", "2", 0.0, 0, prompt=asked),
                answer("1+1", "1", 0.0, 1, prompt=asked),
            ]
        },
    )
    # Pooled by their bare id they would look half solved.
    assert curate(home, [one.id, two.id], "both", where="0 < avg < 1")["kept"] == 0
    saved = curate(home, [one.id, two.id], "both", where="avg == 1", preview=False)
    (row,) = rows_of(home, saved)
    assert row["id"] == f"{env[-12:-6]}/1+1#1" and row["metadata"]["origin"]["env_id"] == env
    assert len(rows_of(home, saved, "heldout")) == 18
    assert any("kept apart" in note for note in saved["warnings"])


def test_models_are_kept_apart_unless_pooled(home: Home, env: str):
    good, bad = [answer("1+1", "2", 1.0)], [answer("1+1", "3", 0.0)]
    run = evaluation(home, env, {"pebble": bad, "other": good}, attempts=1)
    assert curate(home, [run.id], "best", where="0 < avg < 1")["kept"] == 0
    pooled = curate(home, [run.id], "best", where="0 < avg < 1", pool_models=True)
    assert pooled["kept"] == 1 and pooled["examples"][0]["model"] == "other"


def test_whole_conversations_are_kept_as_they_were_played(home: Home, env: str):
    played = [
        {"role": "assistant", "content": "Let me ask."},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "2"},
    ]
    run = evaluation(home, env, {"pebble": [answer("1+1", "2", 1.0, messages=played)]})
    saved = curate(home, [run.id], "turns", preview=False)
    (row,) = rows_of(home, saved)
    assert row["gold"] == [*MIXED[0]["prompt"], *played]


def test_training_rollouts_are_a_source_whole_or_one_step_of_them(home: Home, env: str):
    def rollout(task: str, said: str, reward: float, member: int) -> dict[str, Any]:
        row = answer(task, said, reward) | {
            "group": 0,
            "member": member,
            "advantage": 0.1,
            "turns": 1,
        }
        del row["attempt"]
        return row

    run = training(
        home,
        env,
        rollouts={
            1: [rollout("1+1", "3", 0.0, 0), rollout("1+1", "2", 1.0, 1)],
            2: [rollout("1+2", "3", 1.0, 0), rollout("1+2", "3!", 0.0, 1)],
        },
    )
    assert curate(home, [run.id], "own")["kept"] == 2
    saved = curate(home, [f"{run.id}@step2"], "own", preview=False)
    (row,) = rows_of(home, saved)
    assert row["metadata"]["origin"]["step"] == 2 and row["metadata"]["origin"]["model"] == run.id
    with pytest.raises(UserError, match="no rollouts of step9"):
        curate(home, [f"{run.id}@step9"], "own")
    with pytest.raises(UserError, match="the same rollouts twice"):
        curate(home, [run.id, f"{run.id}@step2"], "own")


def test_repeated_answers_and_answers_that_recite_the_exam_are_dropped(home: Home, env: str):
    rows = [
        answer("1+1", "2", 1.0, 0),
        answer("1+1", " 2 ", 1.0, 1),
        answer("1+1", "What is 9 + 1? 10. And 1 + 1 is 2", 1.0, 2),
        answer("1+1", " ", 1.0, 3),
        answer("1+4", "5", 1.0, 0),
        answer("1+4", "five", 1.0, 1),
    ]
    run = evaluation(home, env, {"pebble": rows}, attempts=4)
    result = curate(home, [run.id], "sums-best", max_per_task=4)
    assert result["kept"] == 3 and result["contaminated"] == {"normalised": 1}
    assert result["dropped"] == {"empty": 1, "contaminated": 1, "duplicate": 1}
    few = curate(home, [run.id], "sums-best", select="best_n", max_per_task=1)
    assert few["kept"] == 2 and few["dropped"]["not_selected"] == 4


def test_held_out_answers_alone_leave_nothing_and_the_error_says_what_to_play(home: Home, env: str):
    run = evaluation(home, env, {"pebble": MIXED[6:8]})
    assert curate(home, [run.id], "sums-best", select="all")["dropped"] == {"heldout": 2}
    with pytest.raises(UserError) as refused:
        curate(home, [run.id], "sums-best", select="all", preview=False)
    assert 'split="train"' in refused.value.hint and "2 heldout" in refused.value.message


def test_wrong_answers_that_are_kept_are_said(home: Home, env: str):
    run = evaluation(home, env, {"pebble": MIXED})
    result = curate(home, [run.id], "sums-best", select="best")
    assert result["kept"] == 3 and any("1 of the 3 rows" in note for note in result["warnings"])


def test_a_key_curates_under_a_name_that_others_share(home: Home, env: str):
    bob = Home(home.root, Viewer("bob", may="use"))
    with Store(home) as store:
        store.add_share(Share("env", "sums", "", "bob", "use"))
    run = evaluation(bob, env, {"pebble": MIXED})
    assert curate(bob, [run.id], "sums", preview=False)["env_id"].startswith("sums@")
    with Store(home) as store:
        assert {row.owner for row in store.list_envs()} == {"", "bob"}


def test_a_dataset_never_takes_the_name_of_an_environment(home: Home, env: str):
    run = evaluation(home, env, {"pebble": MIXED})
    with pytest.raises(UserError, match="is an environment already"):
        curate(home, [run.id], "sums")
    with pytest.raises(UserError, match="is no name"):
        curate(home, [run.id], "Sums Best")
    first = curate(home, [run.id], "mine", preview=False)["env_id"]
    again = curate(home, [run.id], "mine", where="solved", preview=False)["env_id"]
    assert first != again


def test_a_run_without_answers_says_where_to_get_some(home: Home, env: str):
    run = training(home, env, algorithm="sft")
    with pytest.raises(UserError) as refused:
        curate(home, [run.id], "sums-best")
    assert refused.value.code == "NO_EVALUATION" and "attempts=8" in refused.value.hint
    with pytest.raises(UserError) as unknown:
        curate(home, ["nobody-1"], "sums-best")
    assert unknown.value.code == "RUN_NOT_FOUND"


def test_an_answer_fits_what_an_agent_can_afford(home: Home, env: str):
    long = [answer(f"{a}+{b}", "x" * 4000, 1.0) for a in range(1, 8) for b in range(1, 8)]
    run = evaluation(home, env, {f"model-{n}" * 8: long for n in range(8)}, attempts=1)
    result = curate(home, [run.id], "sums-best", select="all")
    assert len(json.dumps(result)) < 10_000 and result["kept"] == 49


def test_exam_tasks_past_the_size_of_the_index_are_said(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = SUMS.replace("What is {a} + {b}?", "Work it out with care, please: what is {a} + {b}?")
    env = push(home, tmp_path / "long", long, "long")
    run = evaluation(home, env, {"pebble": [answer("1+1", "2", 1.0)]}, attempts=1)
    assert not any("size of the index" in note for note in curate(home, [run.id], "x")["warnings"])
    monkeypatch.setattr(overlap, "MOST_GRAMS", 0)
    notes = curate(home, [run.id], "x")["warnings"]
    assert any("8 held-out tasks are past the size of the index" in note for note in notes), notes


PAIRED = [
    answer("1+1", "2", 1.0, 0),
    answer("1+1", "It is 2", 0.0, 1),
    answer("1+1", "two", 0.0, 2),
    answer("1+2", "3", 1.0, 0),
    answer("1+2", "3.", 1.0, 1),
    answer("1+3", "4", 1.0, 0),
    answer("1+3", "5", 0.0, 1),
    answer("9+1", "10", 1.0, 0),
    answer("9+1", "11", 0.0, 1),
]


def test_pairs_of_a_right_and_a_wrong_answer_become_rows_that_dpo_can_learn(home: Home, env: str):
    run = evaluation(home, env, {"pebble": PAIRED})
    saved = curate(home, [run.id], "sums-pairs", select="pairs", preview=False)
    assert saved["kept"] == saved["tasks"] == 2
    # Of 1+1 the wrong answer nearest to the middle, of 1+2 both: they earned the same.
    assert saved["dropped"] == {"heldout": 2, "unpaired": 3}
    assert "2 pairs of 9 attempts" in saved["summary"] and "DPO" in saved["summary"]
    assert saved["next"][0]["arguments"]["algorithm"] == "dpo"
    first, second = rows_of(home, saved)
    assert [message["content"] for message in first["gold"][-1:]] == ["2"]
    pairs = [pair_of(first), pair_of(second)]
    assert pairs[0] is not None and pairs[0].rejected[-1]["content"] in ("It is 2", "two")
    assert pairs[1] is not None
    assert pairs[1].rejected == [*second["prompt"], {"role": "assistant", "content": "5"}]
    assert [row for row in rows_of(home, saved, "heldout") if pair_of(row)] == []


def test_pairs_of_every_fifth_task_are_held_out_to_measure_the_run(home: Home, env: str):
    tasks = [row["id"] for row in read_tasks(find_env(home, env), "train")][:11]
    answers = [
        answer(task, text, reward, member)
        for task in tasks
        for member, (text, reward) in enumerate((("yes", 1.0), ("no", 0.0)))
    ]
    run = evaluation(home, env, {"pebble": answers})
    saved = curate(home, [run.id], "sums-pairs", select="pairs", preview=False)
    held_out = [row["id"] for row in rows_of(home, saved, "heldout") if pair_of(row)]
    assert held_out == [f"{task}#1" for task in sorted(tasks)[4::5]]
    assert len(rows_of(home, saved)) == len(tasks) - len(held_out)


def test_a_curated_row_has_the_tools_that_its_task_had(home: Home, tmp_path: Path):
    tool = {"type": "function", "function": {"name": "add", "description": "Adds."}}
    source = SUMS.replace("answer=", f"tools=[{tool!r}], answer=", 1)
    env = push(home, tmp_path / "tools", source)
    run = evaluation(home, env, {"pebble": [answer("1+1", "2", 1.0, 0)]})
    result = curate(home, [run.id], "sums-tools", preview=False)
    (row,) = rows_of(home, result)
    assert row["metadata"]["tools"] == [tool]
    assert all(each["metadata"]["tools"] == [tool] for each in rows_of(home, result, "heldout"))
