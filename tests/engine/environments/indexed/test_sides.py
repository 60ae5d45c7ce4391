"""Large data are divided by the rule of small data, as far as the limits allow."""

from hypothesis import example, given
from hypothesis import strategies as st

from engine.core.split import prompt_key, split_rows
from engine.environments.indexed import columns, sides
from engine.environments.indexed.scan import HELDOUT, TRAIN, UNSAID

SAID = {None: UNSAID, "train": TRAIN, "heldout": HELDOUT}
WORDS = {sides.IN_TRAIN: "train", sides.IN_HELDOUT: "heldout", sides.OUTSIDE: "outside"}


def hashed(prompts: list[str]) -> list[int]:
    keys = [prompt_key([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [int(key[:16], 16) for key in keys]


def decided(rows: list[tuple[str, str | None]]) -> sides.Sides:
    return sides.decide(hashed([p for p, _ in rows]), bytes(SAID[side] for _, side in rows))


@example(rows=[("a", None), ("a", "train"), ("b", None)], unsaid=False)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefghij"), st.sampled_from([None, None, "train", "heldout"])),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
def test_below_the_limits_it_is_the_rule_of_small_data(rows: list, unsaid: bool):
    rows = [(prompt, None if unsaid else side) for prompt, side in rows]
    small = split_rows(
        [
            {"id": n, "prompt": [{"role": "user", "content": prompt}], "split": side}
            for n, (prompt, side) in enumerate(rows)
        ]
    )
    large = decided(rows)
    assert [WORDS[side] for side in large.of_row] == small.sides
    assert large.source == small.source
    train = {prompt for (prompt, _), side in zip(rows, small.sides, strict=True) if side == "train"}
    assert large.distinct_prompts == len(train)


def test_portions_change_nothing(monkeypatch):
    rows = [(f"p{n % 70}", None) for n in range(200)]
    whole = decided(rows)
    monkeypatch.setattr(columns, "PORTION", 9)
    assert decided(rows) == whole


def test_no_more_is_held_out_than_the_limit(monkeypatch):
    monkeypatch.setattr(sides, "CHOSEN_MOST", 5)
    large = decided([(f"p{n}", None) for n in range(200)])
    assert (large.count(sides.IN_HELDOUT), large.count(sides.IN_TRAIN)) == (5, 195)
    assert not large.warnings


def test_of_a_large_held_out_side_a_sample_is_asked_and_none_of_it_trained_on(monkeypatch):
    monkeypatch.setattr(sides, "NAMED_MOST", 5)
    rows = [(f"p{n}", "heldout") for n in range(20)] + [(f"p{n}", "train") for n in range(10, 30)]
    large = decided(rows)
    counts = [large.count(side) for side in (sides.IN_HELDOUT, sides.OUTSIDE, sides.IN_TRAIN)]
    assert counts[0] <= 5 and counts[0] + counts[1] == 30 and counts[2] == 10
    assert "10 training rows have the prompt of a held-out row" in large.warnings[0]
    assert "30 rows are held out; a sample of" in large.warnings[1]
