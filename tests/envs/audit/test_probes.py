"""Degenerate answers are made from the reference answer, and are never the reference answer."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.audit.probes import (
    GOLD,
    PROBES,
    message_probes,
    take_apart,
    text_probes,
    with_small_change,
)


def probes(gold: str, others: tuple[str, ...] = ("11", "12", "13", "14")) -> dict[str, str]:
    return text_probes("What is it?", gold, others, random.Random(0))


@pytest.mark.parametrize(
    ("gold", "head", "text", "tail"),
    [
        ("7", "", "7", ""),
        ("#### 118", "#### ", "118", ""),
        ("We add.\nAnswer: 7", "We add.\nAnswer: ", "7", ""),
        ("The answer is 7.", "The answer is ", "7", "."),
        ("\\boxed{7}", "\\boxed{", "7", "}"),
        (
            "<think>hm</think><answer>Rome</answer>",
            "<think>hm</think><answer>",
            "Rome",
            "</answer>",
        ),
        ("12 + 3 = 15", "12 + 3 = ", "15", ""),
        ("Rome", "", "Rome", ""),
        ("First line.\nRome\n", "First line.\n", "Rome", "\n"),
    ],
)
def test_a_reference_answer_is_taken_apart(gold: str, head: str, text: str, tail: str):
    core = take_apart(gold)
    assert (core.head, core.text, core.tail) == (head, text, tail)
    assert core.with_text(core.text) == gold


def test_the_probes_of_a_number_keep_its_form():
    made = probes("#### 7", ("#### 1", "#### 2", "#### 3"))
    assert made[GOLD] == "#### 7"
    assert made["negated gold"] == "#### not 7"
    assert made["off by one"] in ("#### 6", "#### 8")
    assert made["gold then wrong"].startswith("#### 7\n#### ")
    assert made["wrong then gold"].endswith("\n#### 7")
    assert made["format only"] == "#### ?"
    assert made["enumerated"].startswith("#### ") and "7" in made["enumerated"].split(" ")[2]
    assert made["other gold"] in ("#### 1", "#### 2", "#### 3")
    assert made["prompt echo"] == "What is it?" and made["empty"] == ""


def test_prose_is_not_attacked_letter_by_letter():
    made = probes("Ada opened a bakery in Ghent last month.", ("Bruno won a prize in Porto.",))
    assert "off by one" not in made and "negated gold" not in made
    assert made["gold then wrong"].endswith("\nBruno won a prize in Porto.")


def test_json_stays_json_where_it_is_changed():
    made = probes('{"who": "Ada", "n": 3}', ('{"who": "Bo", "n": 4}',))
    assert json.loads(made["off by one"]) != json.loads(made[GOLD])
    assert json.loads(made["format only"]) == {"who": "", "n": 0}
    assert json.loads(made[GOLD]) in json.loads(made["enumerated"])
    with pytest.raises(ValueError):
        json.loads(made["truncated gold"])


@given(st.text(max_size=30), st.lists(st.text(max_size=10), max_size=4), st.integers())
def test_no_probe_is_the_reference_answer(gold: str, others: list[str], seed: int):
    made = text_probes("prompt", gold, others, random.Random(seed))
    assert made.pop(GOLD) == gold
    same = [name for name, text in made.items() if text.split() == gold.split()]
    assert same == [] and set(made) <= set(PROBES)


@given(st.text(max_size=30), st.integers())
def test_the_same_seed_makes_the_same_probes(gold: str, seed: int):
    first, second = (text_probes("p", gold, ["a", "b"], random.Random(seed)) for _ in range(2))
    assert first == second


@given(st.one_of(st.integers().map(str), st.text(max_size=12)))
def test_what_is_changed_differs(text: str):
    assert with_small_change(text, random.Random(0)) != text


def test_without_a_reference_answer_only_the_blind_ones_are_left():
    made = text_probes("prompt", None, ["a"], random.Random(0))
    blind = {
        "empty",
        "short junk",
        "junk",
        "long junk",
        "prompt echo",
        "opener only",
        "filler",
        "exception trigger",
    }
    assert set(made) == blind


@pytest.mark.parametrize("seed", range(30))
def test_a_rollout_whose_reference_answer_is_blank_is_attacked_too(seed: int):
    made = message_probes("q", [{"role": "assistant", "content": " "}], [], random.Random(seed))
    [trigger] = made["exception trigger"]
    assert trigger["content"] != " "


def test_rollouts_are_attacked_with_messages():
    gold = [{"role": "assistant", "content": "5"}, {"role": "assistant", "content": "7"}]
    others = [[{"role": "assistant", "content": "9"}]]
    made = message_probes("guess", gold, others, random.Random(0))
    assert made[GOLD] == gold
    assert made["truncated gold"] == gold[:1] and made["last message only"] == gold[1:]
    assert made["other gold"] == others[0]
    assert made["off by one"][0] == gold[0] and made["off by one"][1]["content"] in ("6", "8")
    assert [m["content"] for m in made["empty"]] == [""]
    assert set(made) <= set(PROBES)
