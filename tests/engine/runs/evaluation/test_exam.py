"""Which tasks an evaluation asks, in which order and half."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.runs.evaluation import exam

ids = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=60)


def tasks(names: list[str]) -> list[dict[str, str]]:
    return [{"id": n} for n in names]


@given(ids, st.randoms(use_true_random=False))
def test_the_order_of_the_tasks_depends_on_their_ids_alone(names: list[str], rng) -> None:
    shuffled = names[:]
    rng.shuffle(shuffled)
    assert exam.ordered(tasks(names), 1000) == exam.ordered(tasks(shuffled), 1000)


@given(ids, st.integers(1, 60))
def test_asking_for_fewer_tasks_keeps_the_first_and_their_halves(names: list[str], n: int) -> None:
    all_tasks = exam.ordered(tasks(names), 1000)
    fewer = exam.ordered(tasks(names), n)
    assert fewer == all_tasks[:n]
    wide, narrow = exam.halves(all_tasks), exam.halves(fewer)
    assert all(wide[k] == v for k, v in narrow.items())


@given(ids)
def test_the_halves_differ_by_at_most_one_task(names: list[str]) -> None:
    halves = list(exam.halves(exam.ordered(tasks(names), 1000)).values())
    assert abs(halves.count(exam.VALIDATION) - halves.count(exam.TEST)) <= 1


def asking(prompts: list[int]) -> list[dict[str, Any]]:
    return exam.ordered(
        [
            {"id": f"{at}", "prompt": [{"role": "user", "content": f"What is {prompt}?"}]}
            for at, prompt in enumerate(prompts)
        ],
        1000,
    )


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60))
def test_tasks_of_one_prompt_stand_in_one_half(prompts: list[int]) -> None:
    asked = asking(prompts)
    half = exam.halves(asked)
    by_prompt: dict[str, set[str]] = {}
    for task in asked:
        by_prompt.setdefault(str(task["prompt"]), set()).add(half[task["id"]])
    assert all(len(found) == 1 for found in by_prompt.values()) or len(by_prompt) == 1
    assert set(half.values()) == {exam.VALIDATION, exam.TEST}


@given(st.integers(1, 60))
def test_tasks_of_different_prompts_alternate(n: int) -> None:
    halves = list(exam.halves(asking(list(range(n)))).values())
    assert halves == [exam.TEST if at % 2 else exam.VALIDATION for at in range(n)]


@given(st.lists(st.sampled_from("abcdef"), min_size=2, max_size=60))
def test_tasks_of_one_group_stand_in_one_half(groups: list[str]) -> None:
    asked = [task | {"group": group} for task, group in zip(asking([*range(99)]), groups)]  # noqa: B905
    half = exam.halves(asked)
    by_group: dict[str, set[str]] = {}
    for task in asked:
        by_group.setdefault(task["group"], set()).add(half[task["id"]])
    assert all(len(halves) == 1 for halves in by_group.values()) or len(by_group) == 1
    assert set(half.values()) == {exam.VALIDATION, exam.TEST}


def test_dev_tasks_choose_and_every_held_out_task_is_reported() -> None:
    sides = ["dev", "heldout", "heldout", "dev", "heldout"]
    asked = [task | {"split": side} for task, side in zip(asking([*range(5)]), sides, strict=True)]
    halves = exam.halves(asked)
    assert [halves[task["id"]] for task in asked] == [
        "select" if side == "dev" else "report" for side in sides
    ]
