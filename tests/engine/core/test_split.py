"""Held-out rows: deterministic, of the promised size, and never on both sides."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.split import UnknownSplit, family_keys, prompt_key, split_rows


def row(number: int, text: str, split: str | None = None) -> dict:
    return {"id": str(number), "prompt": [{"role": "user", "content": text}], "split": split}


rows_of_any_kind = st.lists(
    st.tuples(
        st.integers(0, 30), st.sampled_from([None, None, "train", "heldout", "test", "validation"])
    ),
    max_size=60,
).map(lambda pairs: [row(n, f"p{text}", split) for n, (text, split) in enumerate(pairs)])


@given(rows_of_any_kind)
def test_equal_prompts_share_a_side(rows: list[dict]):
    sides = split_rows(rows).sides
    by_prompt: dict[str, set[str]] = {}
    for entry, side in zip(rows, sides, strict=True):
        by_prompt.setdefault(prompt_key(entry["prompt"]), set()).add(side)
    assert all(len(found) == 1 for found in by_prompt.values())
    assert set(sides) <= {"train", "heldout"}


@given(rows_of_any_kind, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rows: list[dict], rng: random.Random):
    before = {r["id"]: side for r, side in zip(rows, split_rows(rows).sides, strict=True)}
    shuffled = rng.sample(rows, len(rows))
    after = {r["id"]: side for r, side in zip(shuffled, split_rows(shuffled).sides, strict=True)}
    assert before == after


@given(rows_of_any_kind)
def test_a_row_that_says_held_out_is_held_out(rows: list[dict]):
    for entry, side in zip(rows, split_rows(rows).sides, strict=True):
        if entry["split"] not in (None, "train"):
            assert side == "heldout"


@given(st.integers(2, 700))
def test_a_fifth_is_held_out_but_at_least_fifty_or_half(count: int):
    sides = split_rows([row(n, f"prompt {n}") for n in range(count)]).sides
    held = Counter(sides)["heldout"]
    assert held == max(math.ceil(0.2 * count), min(50, count // 2))
    assert 0 < held < count


@given(st.lists(st.integers(1, 40), min_size=2, max_size=20))
def test_repeated_prompts_never_leave_a_side_empty(sizes: list[int]):
    rows = [row(100 * g + n, f"p{g}") for g, size in enumerate(sizes) for n in range(size)]
    sides = split_rows(rows).sides
    assert set(sides) == {"train", "heldout"}


def test_most_rows_keep_their_side_when_rows_are_added():
    few = [row(n, f"prompt {n}") for n in range(1000)]
    many = few + [row(n, f"prompt {n}") for n in range(1000, 1100)]
    before, after = split_rows(few).sides, split_rows(many).sides
    changed = sum(a != b for a, b in zip(before, after, strict=False))
    assert changed < 40


def test_a_training_row_with_a_held_out_prompt_is_moved_and_told():
    rows = [row(1, "a", "train"), row(2, " a ", "test"), row(3, "b", "train")]
    split = split_rows(rows)
    assert split.sides == ["heldout", "heldout", "train"]
    assert "1 training rows have the prompt of a held-out row" in split.warnings[0]


def test_silent_rows_train_where_others_are_held_out_by_name():
    split = split_rows([row(1, "a"), row(2, "b", "eval"), row(3, "c")])
    assert (split.sides, split.source) == (["train", "heldout", "train"], "mixed")


def test_where_the_sides_come_from_is_said():
    assert split_rows([row(n, f"p{n}") for n in range(4)]).source == "hash"
    assert split_rows([row(1, "a", "train"), row(2, "b", "test")]).source == "rows"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(1, "a")], "no row is held out (there are too few prompts)"),
        ([row(1, "a"), row(2, "a")], "no row is held out (there are too few prompts)"),
        ([row(1, "a", "train"), row(2, "b", "train")], "no row is held out (every row says train)"),
        ([row(1, "a", "test")], "nothing to train on"),
    ],
)
def test_an_empty_side_is_a_warning(rows: list[dict], said: str):
    assert any(said in warning for warning in split_rows(rows).warnings)


def test_a_split_nobody_knows_is_refused():
    with pytest.raises(UnknownSplit, match="row '1' names the split 'tset'"):
        split_rows([row(1, "a", "tset")])


def test_roles_and_tool_calls_make_prompts_differ():
    one = [{"role": "user", "content": "a"}]
    other = [{"role": "system", "content": "a"}]
    assert prompt_key(one) != prompt_key(other)
    assert prompt_key(one) == prompt_key([{"content": " a\n", "role": "user"}])


def test_copies_of_a_few_held_out_questions_are_said_with_both_numbers():
    rows = [row(n, f"t{n}", "train") for n in range(80)]
    rows += [row(100 + n, f"h{n % 4}", "heldout") for n in range(400)]
    (said,) = split_rows(rows).warnings
    assert said.startswith("400 held-out rows, 4 different prompts: ")


def test_a_few_repeated_prompts_are_not_worth_a_warning():
    rows = [row(n, f"t{n}", "train") for n in range(80)]
    rows += [row(100 + n, f"h{n % 95}", "heldout") for n in range(100)]
    assert split_rows(rows).warnings == []


def named(counts: dict[str, int]) -> list[dict]:
    sides = [side for side, count in counts.items() for _ in range(count)]
    return [row(n, f"prompt {n}", side) for n, side in enumerate(sides)]


def test_dev_rows_are_a_side_of_their_own_beside_held_out_ones():
    split = split_rows(named({"train": 8, "dev": 4, "heldout": 6}))
    assert split.counts() == {"train": 8, "dev": 4, "heldout": 6}
    assert split.warnings == []


def test_without_dev_rows_no_such_side_is_counted():
    assert split_rows(named({"train": 8, "heldout": 6})).counts() == {"train": 8, "heldout": 6}


def test_dev_rows_alone_are_held_out_as_a_verdict_needs_some():
    split = split_rows(named({"train": 8, "dev": 6}))
    assert split.counts() == {"train": 8, "heldout": 6}
    assert "no row is held out beside the dev rows" in split.warnings[0]


def test_beside_dev_rows_the_held_out_ones_are_chosen_among_rows_that_name_no_side():
    rows = [row(n, f"prompt {n}", "dev" if n < 10 else None) for n in range(110)]
    split = split_rows(rows)
    assert split.counts() == {"train": 50, "dev": 10, "heldout": 50}
    assert set(split.sides[:10]) == {"dev"}


@pytest.mark.parametrize("sides", [("train", "dev"), ("dev", "heldout"), ("train", "heldout")])
def test_equal_prompts_on_two_sides_go_to_the_stricter_one(sides: tuple[str, str]):
    rows = [row(1, "same", sides[0]), row(2, "same", sides[1]), *named({"train": 2, "heldout": 30})]
    split = split_rows(rows)
    assert split.sides[:2] == [sides[1]] * 2
    (warning,) = split.warnings
    kind = {"train": "training"}.get(sides[0], sides[0])
    assert f"1 {kind} rows have the prompt of a" in warning


@given(st.integers(4, 400), st.floats(0.05, 0.5))
def test_a_share_of_the_rows_becomes_dev_and_the_held_out_ones_stay(count: int, share: float):
    rows = [row(n, f"prompt {n}") for n in range(count)]
    plain, divided = split_rows(rows), split_rows(rows, share)
    heldout = [side == "heldout" for side in plain.sides]
    assert heldout == [side == "heldout" for side in divided.sides]
    train_rows = plain.counts()["train"]
    wanted = min(math.ceil(share * count), train_rows - 1)
    assert divided.counts().get("dev", 0) == wanted
    assert divided.counts()["train"] == train_rows - wanted >= 1


rows_of_families = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from(["", "", "a", "b", "c", "d"]),
        st.sampled_from([None, None, "train", "dev", "heldout"]),
    ),
    max_size=40,
).map(
    lambda entries: [
        row(n, f"p{text}", split) | ({"group": group} if group else {})
        for n, (text, group, split) in enumerate(entries)
    ]
)


@given(rows_of_families, st.sampled_from([0.0, 0.2]))
def test_rows_of_one_group_share_a_side_whatever_they_and_their_prompts_name(
    rows: list[dict], share: float
):
    sides = split_rows(rows, share).sides
    for key in ("group", "prompt"):
        sides_of: dict[str, set[str]] = {}
        for entry, side in zip(rows, sides, strict=True):
            if entry.get(key):
                sides_of.setdefault(str(entry[key]), set()).add(side)
        assert all(len(found) == 1 for found in sides_of.values())


def test_families_reach_over_prompts_and_groups_and_no_further():
    rows = [
        row(1, "a") | {"group": "x"},
        row(2, "b") | {"group": "x"},
        row(3, "b") | {"group": "y"},
        row(4, "c") | {"group": "y"},
        row(5, "d"),
    ]
    keys = family_keys(rows)
    assert len(set(keys[:4])) == 1
    assert keys[4] == prompt_key(rows[4]["prompt"]) != keys[0]


def test_a_fifth_of_the_families_is_held_out_whole():
    rows = [row(n, f"prompt {n}") | {"group": f"template {n // 10}"} for n in range(300)]
    sides = split_rows(rows).sides
    assert Counter(sides) == {"train": 240, "heldout": 60}
    for first in range(0, 300, 10):
        assert len(set(sides[first : first + 10])) == 1
