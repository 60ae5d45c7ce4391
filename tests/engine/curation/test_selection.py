"""Rules over a task's attempts, and which attempts are taken, held to hand-made groups."""

import itertools
import random
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.curation.selection import (
    Attempt,
    Rule,
    check_selection,
    facts_of,
    groups_of,
    pairs_in,
    ranked,
)


def attempt(member: int, reward: float, **more: Any) -> Attempt:
    values: dict[str, Any] = {
        "source": "sums-eval-1",
        "env_id": "sums@0123456789ab",
        "task": "t1",
        "model": "pebble",
        "step": 0,
        "member": member,
        "prompt": [{"role": "user", "content": "3 + 4?"}],
        "messages": [{"role": "assistant", "content": f"answer {member}"}],
        "reward": reward,
        "success": reward >= 1.0,
        "tokens": 4,
        "stop_reason": "stop",
        "error": None,
        "metrics": {},
    }
    return Attempt(**(values | more))


FOUR = [
    attempt(0, 1.0, tokens=9, metrics={"format": 1.0}),
    attempt(1, 0.25, tokens=3, metrics={"format": 0.0}),
    attempt(2, 0.0, success=False, error="score() raised", tokens=5),
    attempt(3, 1.0, tokens=6, metrics={"format": 1.0}),
]


def test_the_facts_of_a_task_leave_errors_out_of_every_mean():
    facts = facts_of(FOUR)
    assert (facts.n, facts.n_correct, facts.n_error) == (4, 2, 1)
    assert (facts.avg, facts.best, facts.worst) == (0.75, 1.0, 0.25)
    assert facts.length == 6.0 and facts.solved is True
    assert facts.metrics == {"format": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ("", True),
        ("0 < avg < 1", True),
        ("avg == 0.75 and best - worst == 0.75", True),
        ("solved and n_error == 0", False),
        ("not solved or length > 5", True),
        ("n_correct / (n - n_error) > 0.6", True),
        ("format > 0.5", True),
        ('metrics["format"] > 0.9', False),
        ("model == 'pebble' and task == \"t1\"", True),
        ("pass@1 > 0.66 and pass@1 < 0.67", True),  # 2 of 3
        ("pass@2 == 1", True),  # two draws from 3 with 2 right always hold one
        ("pass @ 1 < pass@2", True),
        ("task == 'pass@9'", False),  # text in quotes asks for nothing
    ],
)
def test_a_rule_says_whether_a_task_matches(rule: str, holds: bool):
    assert Rule(rule, ["format"]).matches(FOUR) is holds


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("avg", "gives 0.75 on task 't1', not true or false"),
        ("n_correct", "gives 2 on task 't1'"),
        ("avg / (n - 4) > 1", "divides by zero on task 't1'"),
        ("pass@4 > 0", "task 't1' has 3 scored attempts"),
        ("avg@3 > 0", "only pass takes @k"),
        ("best@0 > 0", "only pass takes @k"),
        ("pass@0 > 0", "pass@0"),
        ("pass@k > 0", "pass@k"),
        ("pass@ > 0", "pass@"),
        ("avrage > 0", "did you mean 'avg'"),
        ("avg ** 2 > 0", "Pow"),
        ("avg.real > 0", "Attribute"),
        ("open('x')", "calls something other"),
        ("avg >", "is no expression"),
        ("'a' * 3 == 'aaa'", "arithmetic needs numbers"),
    ],
)
def test_a_rule_that_cannot_be_worked_out_is_refused_in_words(rule: str, said: str):
    with pytest.raises(UserError) as refused:
        Rule(rule, ["format"]).matches(FOUR)
    assert said in refused.value.message and refused.value.code == "BAD_ARGUMENT"
    assert refused.value.field == "where" and repr(rule) in refused.value.message


def test_a_task_without_a_scored_attempt_matches_no_comparison():
    broken = [attempt(0, 0.0, error="boom"), attempt(1, 0.0, error="boom")]
    assert not Rule("avg < 1").matches(broken)
    assert Rule("n_error == 2 and not solved").matches(broken)


def test_attempts_are_grouped_by_content_hash_task_and_model():
    mixed = [
        attempt(0, 1.0),
        attempt(1, 0.0, model="other"),
        attempt(2, 1.0, env_id="sums@ffffffffffff"),
        attempt(3, 0.0, env_id="renamed@0123456789ab"),
    ]
    assert list(groups_of(mixed, pool_models=False)) == [
        ("0123456789ab", "t1", "other"),
        ("0123456789ab", "t1", "pebble"),
        ("ffffffffffff", "t1", "pebble"),
    ]
    pooled = groups_of(mixed, pool_models=True)
    assert [len(group) for group in pooled.values()] == [3, 1]


@pytest.mark.parametrize(
    ("select", "order"),
    [
        ("correct", [3, 0]),  # equal rewards: the shorter first
        ("best", [3, 0, 1]),
        ("best_n", [3, 0, 1]),
        ("shortest", [3, 0]),
        ("all", [0, 1, 3]),
    ],
)
def test_each_selection_takes_its_attempts_in_its_order(select: str, order: list[int]):
    scored = [a for a in FOUR if a.error is None]
    fit, unfit = ranked(scored, select)
    assert [a.member for a in fit] == order
    assert {a.member for a in unfit} == {0, 1, 3} - set(order)


def test_shortest_looks_at_correct_answers_alone():
    fit, unfit = ranked([attempt(0, 0.0, tokens=1), attempt(1, 1.0, tokens=8)], "shortest")
    assert [a.member for a in fit] == [1] and [a.member for a in unfit] == [0]


@pytest.mark.parametrize("select", ["correct", "best", "best_n", "shortest", "all"])
def test_ties_are_decided_alike_in_whatever_order_the_sources_came(select: str):
    tied = [
        attempt(m, 1.0, source=s, step=t) for s, t, m in itertools.product("ab", (1, 2), (0, 1))
    ]
    orders = set()
    for seed in range(20):
        mixed = random.Random(seed).sample(tied, len(tied))
        (group,) = groups_of(mixed, pool_models=False).values()
        fit, _ = ranked(group, select)
        orders.add(tuple((a.source, a.step, a.member) for a in fit))
    assert orders == {tuple(itertools.product("ab", (1, 2), (0, 1)))}


def test_a_number_that_would_do_nothing_is_refused():
    check_selection("best_n", 4)
    for select, number in [("best", 2), ("all", 3), ("correct", 0), ("correct", True)]:
        with pytest.raises(UserError) as refused:
            check_selection(select, number)
        assert refused.value.field == "max_per_task"
    with pytest.raises(UserError, match="does not exist"):
        check_selection("newest", 1)


def test_the_best_is_paired_with_the_worst_and_equals_make_no_pair() -> None:
    group = [attempt(reward=r, member=i) for i, r in enumerate((0.5, 1.0, 0.0, 0.5, 0.2))]
    pairs = [(better.reward, worse.reward) for better, worse in pairs_in(group)]
    assert pairs == [(1.0, 0.0), (0.5, 0.2)]
    assert pairs_in(group[:1]) == []
    assert pairs_in([attempt(reward=0.5, member=i) for i in range(4)]) == []


def test_a_right_answer_is_better_than_a_wrong_one_that_was_paid_more() -> None:
    right = attempt(reward=0.4, success=True, member=0)
    wrong = attempt(reward=0.6, success=False, member=1)
    assert pairs_in([wrong, right]) == [(right, wrong)]
