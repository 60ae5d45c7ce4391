"""Rows that are likely of one family, on both sides of the split."""

import random

from engine.evidence.overlap.families import family_hint


def row(prompt: str, split: str, group: str = "") -> dict:
    return {"prompt": [{"role": "user", "content": prompt}], "split": split, "group": group}


def sums(group=lambda a, b: "") -> list[dict]:
    """All sums of two digits: a + b is trained on where a <= b, else held out."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    return [
        row(f"What is {a} + {b}?", "train" if a <= b else "heldout", group(a, b)) for a, b in pairs
    ]


def test_prompts_of_the_same_words_in_another_order_are_named_with_the_group_to_give():
    (hint,) = family_hint(sums())
    assert "36 of 36 held-out rows (100 %) have the words of a training row in another" in hint
    assert '"What is 2 + 1?" and "What is 1 + 2?"' in hint
    assert 'Task(..., group="1 2")' in hint and 'a key "group" in a data row' in hint


def test_rows_that_have_groups_need_no_hint():
    assert family_hint(sums(lambda a, b: f"{min(a, b)}+{max(a, b)}")) == []


def test_one_noun_in_many_templates_is_named():
    nouns = ["cat", "river", "stone", "lamp", "bread", "ship", "cloud", "horse", "ring", "tower"]
    nouns += ["field", "sword"]
    templates = [f"Template {word}: write the plural of" for word in ("a one", "b two", "c three")]
    templates += [f"Please {word} say what a group is called of one" for word in ("now", "kindly")]
    rows = [
        row(f"{text} {noun}.", "heldout" if (at + number) % 4 == 0 else "train")
        for at, noun in enumerate(nouns)
        for number, text in enumerate(templates)
    ]
    (hint,) = family_hint(rows)
    assert "ask about a term of training rows" in hint and "in 5 rows of both sides" in hint
    assert any(f'group="{noun}"' in hint for noun in nouns)


def test_rows_of_their_own_are_no_families():
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(400)]
    texts = [" ".join(["Is this", *rng.sample(words, 12), "good?"]) for _ in range(200)]
    rows = [row(text, "heldout" if at % 5 == 0 else "train") for at, text in enumerate(texts)]
    assert family_hint(rows) == []
    numbers = [
        row(f"What is {at} + {at * 7 + 3}?", "train" if at % 5 else "dev") for at in range(200)
    ]
    assert family_hint(numbers) == []
    assert family_hint([row("a b", "train"), row("b a", "heldout")]) == []  # too few to tell
