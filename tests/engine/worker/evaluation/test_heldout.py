"""Which held-out tasks are met, in which half, and what a summary counts."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.core.metrics import HELDOUT, LINE_KEYS, METRICS, curve_name
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.evaluate import samples_of
from engine.worker.evaluation import heldout

ids = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=60)


def tasks(names: list[str]) -> list[dict[str, str]]:
    return [{"id": n} for n in names]


@given(ids, st.randoms(use_true_random=False))
def test_the_order_of_the_tasks_depends_on_their_ids_alone(names: list[str], rng) -> None:
    shuffled = names[:]
    rng.shuffle(shuffled)
    assert heldout.ordered(tasks(names), 1000) == heldout.ordered(tasks(shuffled), 1000)


@given(ids, st.integers(1, 60))
def test_asking_for_fewer_tasks_keeps_the_first_and_their_halves(names: list[str], n: int) -> None:
    all_tasks = heldout.ordered(tasks(names), 1000)
    fewer = heldout.ordered(tasks(names), n)
    assert fewer == all_tasks[:n]
    wide, narrow = heldout.halves(all_tasks), heldout.halves(fewer)
    assert all(wide[k] == v for k, v in narrow.items())


@given(ids)
def test_the_halves_differ_by_at_most_one_task(names: list[str]) -> None:
    halves = list(heldout.halves(heldout.ordered(tasks(names), 1000)).values())
    assert abs(halves.count(heldout.VALIDATION) - halves.count(heldout.TEST)) <= 1


def asking(prompts: list[int]) -> list[dict[str, Any]]:
    return heldout.ordered(
        [
            {"id": f"{at}", "prompt": [{"role": "user", "content": f"What is {prompt}?"}]}
            for at, prompt in enumerate(prompts)
        ],
        1000,
    )


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60))
def test_tasks_of_one_prompt_stand_in_one_half(prompts: list[int]) -> None:
    asked = asking(prompts)
    half = heldout.halves(asked)
    by_prompt: dict[str, set[str]] = {}
    for task in asked:
        by_prompt.setdefault(str(task["prompt"]), set()).add(half[task["id"]])
    assert all(len(found) == 1 for found in by_prompt.values()) or len(by_prompt) == 1
    assert set(half.values()) == {heldout.VALIDATION, heldout.TEST}


@given(st.integers(1, 60))
def test_tasks_of_different_prompts_alternate(n: int) -> None:
    halves = list(heldout.halves(asking(list(range(n)))).values())
    assert halves == [heldout.TEST if at % 2 else heldout.VALIDATION for at in range(n)]


@given(st.lists(st.sampled_from("abcdef"), min_size=2, max_size=60))
def test_tasks_of_one_group_stand_in_one_half(groups: list[str]) -> None:
    asked = [task | {"group": group} for task, group in zip(asking([*range(99)]), groups)]  # noqa: B905
    half = heldout.halves(asked)
    by_group: dict[str, set[str]] = {}
    for task in asked:
        by_group.setdefault(task["group"], set()).add(half[task["id"]])
    assert all(len(halves) == 1 for halves in by_group.values()) or len(by_group) == 1
    assert set(half.values()) == {heldout.VALIDATION, heldout.TEST}


def test_dev_tasks_choose_and_every_held_out_task_is_reported() -> None:
    sides = ["dev", "heldout", "heldout", "dev", "heldout"]
    asked = [task | {"split": side} for task, side in zip(asking([*range(5)]), sides, strict=True)]
    halves = heldout.halves(asked)
    assert [halves[task["id"]] for task in asked] == [
        "select" if side == "dev" else "report" for side in sides
    ]


def play(reward: float, success: bool | None = None, error: str | None = None) -> Trajectory:
    return Trajectory("t", [], [1], reward=reward, success=success, error=error)


def test_errors_count_as_not_solved_and_are_told_apart() -> None:
    summary = heldout.summarise([play(1, True), play(0, False), play(0, None, "boom")])
    assert (summary.n, summary.errors) == (3, 1)
    assert summary.success == 1 / 3
    assert summary.curves()["heldout_reward"] == 1 / 3


def test_without_success_there_is_no_success_curve() -> None:
    assert "heldout_success" not in heldout.summarise([play(0.5)]).curves()


def test_a_metric_named_like_a_measured_column_stands_beside_it() -> None:
    named = {"success": 9.0, "reward": 8.0, "loss": 7.0, "parsed": 1.0}
    right = Trajectory("t", [], [1], reward=0.25, success=False, metrics=named)
    curves = heldout.summarise([right]).curves()
    assert curves == {
        "heldout_success": 0.0,
        "heldout_reward": 0.25,
        "heldout_env_success": 9.0,
        "heldout_env_reward": 8.0,
        "heldout_env_loss": 7.0,
        "heldout_parsed": 1.0,
    }


@given(st.sampled_from([*METRICS, *LINE_KEYS]), st.sampled_from(["", HELDOUT]))
def test_no_name_of_a_scorer_is_a_column_of_ours(column: str, before: str) -> None:
    for name in (column, column.removeprefix(HELDOUT)):
        assert before + curve_name(name) not in METRICS | dict.fromkeys(LINE_KEYS)


def test_a_checkpoint_is_chosen_by_success_and_else_by_reward() -> None:
    named = {"success": 1.0, "reward": 1.0}
    plays = [
        Trajectory("t", [], [1], reward=0.75, success=ok, metrics=named) for ok in (True, False)
    ]
    assert heldout.summarise(plays).score == 0.5
    assert heldout.summarise([play(0.75)]).score == 0.75


def test_trajectories_are_judged_by_reward_success_error_and_length() -> None:
    cut = Trajectory("t", [], [1], loss_mask=[1, 1, 0], stop_reason="max_tokens", completion="hm")
    (found,) = samples_of([Group("a", [play(1, True), play(0, None, "boom"), cut])])
    assert [s.solved for s in found] == [True, False, False]
    assert [s.error for s in found] == [False, True, False]
    assert (found[2].tokens, found[2].cut, found[2].text) == (2, True, "hm")
