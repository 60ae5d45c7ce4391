"""Held-out tasks planted in training rows are found; tasks of one template accuse nobody."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.overlap import overlap
from engine.evidence.overlap.overlap import HeldOut, scan, tokens_of

STORY = (
    "A ferry leaves the old harbour at nine in the morning with 140 passengers and drops 35 of "
    "them at the lighthouse before it reaches the far island. How many passengers get off there?"
)
PLAN = "First carry the boats up to the shed, then count the ropes and write the number down."


def row(ident: str, prompt: str, answer: str = "", system: str = "") -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    said = [{"role": "assistant", "content": answer}] if answer else None
    return {"id": ident, "prompt": messages, "answer": said}


def found(train: dict[str, Any], heldout: dict[str, Any]) -> list[tuple[str, str, bool]]:
    return [(m.kind, m.part, m.spoils) for m in HeldOut([heldout]).matches(train)]


@pytest.mark.parametrize(
    ("copied", "kind"),
    [
        ("What is 3 + 4?", "exact"),
        ("  What is 3 + 4?\n", "exact"),
        ("what IS   3+4", "normalised"),
        ("**What is 3 + 4**!!", "normalised"),
        ("Question: What is 3 + 4?", "normalised"),
        ("What is “3 + 4”?", "normalised"),
    ],
)
def test_a_copied_question_is_found_whatever_its_dress(copied: str, kind: str):
    assert found(row("t", copied, "7"), row("h", "What is 3 + 4?", "7")) == [(kind, "prompt", True)]


@pytest.mark.parametrize(
    "other",
    [
        "What is 3 - 4?",
        "What is 3 * 4?",
        "What is 3 + 44?",
        "What is 3.4?",
        "What is 3 + 4 + 5?",
        "What is 4 + 3?",
    ],
)
def test_another_sum_is_another_task(other: str):
    assert found(row("t", other, "7"), row("h", "What is 3 + 4?", "7")) == []


def test_brackets_beside_operators_make_another_task():
    assert tokens_of("(1 + 2) * 3") != tokens_of("1 + (2 * 3)")
    assert tokens_of("Work out (3 + 4).") == tokens_of("work out 3 + 4")
    assert tokens_of("¬¬p") != tokens_of("¬p") != tokens_of("p")
    assert tokens_of("p → ¬¬q") == ["p", "→", "¬", "¬", "q"]


@pytest.mark.parametrize("code", ["n = total() + 1", "a = [] + [1]", "def f(a=()): return -(a)"])
def test_empty_brackets_beside_operators_are_read_as_any_text(code: str):
    assert tokens_of(code) == tokens_of(code.upper())
    assert found(row("t-1", code), row("h-1", code)) == [("exact", "prompt", True)]


def test_a_task_about_capitals_is_told_apart_by_its_answer():
    exam = row("h", "How many capitals has aBc?", "1")
    assert found(row("t", "How many capitals has ABC?", "3"), exam) == []
    assert found(row("t", "how many capitals has ABC?", "It is 1."), exam) == [
        ("normalised", "prompt", True)
    ]


def test_another_system_message_hides_nothing():
    assert found(row("t", STORY, "105", system="Be brief."), row("h", STORY, "105")) == [
        ("exact", "prompt", True)
    ]


def test_a_question_taught_inside_an_answer_spoils_it_and_one_quoted_in_a_prompt_is_named():
    exam = row("h", "What is 3 + 4?", "7")
    inside = row("t", "Recite the exam.", "Gladly.\nQ: What is 3 + 4? A: 7")
    assert found(inside, exam) == [("normalised", "prompt", True)]
    quoted = row("t", "What is 3 + 4? And what is twice that?", "14")
    assert found(quoted, exam) == [("normalised", "prompt", False)]


def test_a_short_prompt_is_not_found_in_answers_that_happen_to_say_it():
    assert found(row("t", "What is 6 + 6?", "12"), row("h", "12", "24")) == []


def test_a_paraphrase_with_a_long_shared_run_of_words_is_found():
    paraphrase = (
        "Imagine this: a ferry leaves the old harbour at nine in the morning with 140 passengers "
        "and drops 35 of them at a beach. Who stays aboard?"
    )
    assert found(row("t", paraphrase, "105"), row("h", STORY, "105")) == [
        ("ngram", "prompt", False)
    ]
    assert found(row("t", "A ferry leaves the old harbour at nine.", "ok"), row("h", STORY)) == []


def test_half_of_a_task_counts_only_with_its_numbers():
    body = "has red and green stones of all sizes in her big bag"  # 12 words: too few for a run
    exam = row("h", f"Ada {body}, 12 or 19?", "19")
    same = row("t", f"Bea {body}; is it 12 or maybe 19?", "12")
    other = row("t", f"Bea {body}; is it 3 or maybe 5?", "3")
    assert found(same, exam) == [("ngram", "prompt", False)]
    assert found(other, exam) == []


def test_a_copied_answer_is_found_when_it_is_long_enough_to_be_told_from_others():
    exam = row("h", "What is to be done at the pier?", PLAN)
    assert found(row("t", "Tell me anything.", PLAN.upper()), exam) == [
        ("normalised", "answer", False)
    ]
    assert found(row("t", "Tell me anything.", "Carry."), row("h", "And?", "Carry.")) == []


def test_a_common_form_accuses_nobody():
    form = "Read the following sentence with care and answer with one word only, please: is {} red?"
    words = [f"thing{n}" for n in range(40)]
    result = scan(
        [row(f"t{w}", form.format(w), "no") for w in words[:30]],
        [row(f"h{w}", form.format(w), "no") for w in words[30:]],
    )
    assert result["verdict"] == "clean" and result["examples"] == []


def test_planted_copies_are_counted_once_each_and_named():
    heldout = [row(f"h{n}", f"What is {n} + 500?", str(n + 500)) for n in range(100)]
    train = [row(f"t{n}", f"What is {n} + 900?", str(n + 900)) for n in range(300)]
    train += [row("copy", "What is 7 + 500?", "507"), row("again", "What is 7 + 500?", "507")]
    train += [row("dressed", "what is  8 + 500", "508")]
    result = scan(train, heldout)
    assert (result["exact"], result["normalised"], result["ngram"]) == (1, 1, 0)
    assert result["leaked"] == ["h7", "h8"] and result["verdict"] == "leak"
    assert result["examples"][0] == {
        "kind": "exact",
        "part": "prompt",
        "heldout": "h7",
        "train": "again",
    }
    assert "2 of 100 held-out tasks" in result["headline"] and "'h7'" in result["headline"]
    assert scan(train[:300] + train[-1:], heldout)["verdict"] == "overlap"


def test_two_held_out_tasks_with_one_question_are_both_found():
    twice = [row("h1", STORY, "105"), row("h2", STORY, "105"), row("h3", STORY.lower(), "105")]
    assert scan([row("t", STORY, "105")], twice)["leaked"] == ["h1", "h2", "h3"]


def test_the_sentence_tells_repeated_answers_from_repeated_questions():
    answer = "The first letter is f and the last letter is a"
    heldout = [row("h1", "Ends of flfhaa?", answer), row("h2", STORY, "105")]
    other_question = row("t1", "Ends of fwfsa?", answer)
    alone = scan([other_question], heldout)
    assert alone["verdict"] == "overlap" and alone["leaked"] == [] and alone["answers"] == 1
    assert alone["headline"].startswith(
        "1 of 2 held-out tasks have the reference answer of a training row to another question "
    )
    both = scan([other_question, row("t2", STORY, "105")], heldout)
    assert both["leaked"] == ["h2"] and (both["answers"], both["exact"]) == (1, 2)
    assert "(1 of them in the reference answer alone; 2 exact)" in both["headline"]


def test_nothing_to_compare_is_clean():
    assert scan([], [row("h", STORY)])["verdict"] == "clean"
    assert scan([row("t", STORY)], [])["compared"] == [1.0, 1.0]


@pytest.mark.timeout(30)
def test_a_time_limit_is_kept_and_said():
    words = " ".join(f"word{n}" for n in range(2000))
    rows = [row(f"t{n}", f"{n} {words}", words) for n in range(200)]
    began = time.monotonic()
    result = scan(rows, [row(f"h{n}", f"{n} other {words}") for n in range(20)], budget_s=0.2)
    assert time.monotonic() - began < 5
    assert 0 < result["compared"][0] < 1 and "% of the rows" in result["headline"]


def test_tasks_past_the_size_of_the_index_are_counted_and_said(monkeypatch: pytest.MonkeyPatch):
    # Each task has 13 sequences of eight words: the third finds the index full.
    body = "a b c d e f g h i j k l m n o p q r s"
    heldout = [row(f"h{n}", " ".join(f"{word}{n}" for word in body.split())) for n in range(5)]
    parts = [row(f"t{n}", f"Then: {heldout[n]['prompt'][0]['content'][3:]}") for n in range(5)]
    whole = scan(parts, heldout)
    assert (whole["unindexed"], whole["ngram"]) == (0, 5) and "indexed" not in whole["headline"]
    monkeypatch.setattr(overlap, "MOST_GRAMS", 20)
    part = scan([*parts, row("copy", heldout[2]["prompt"][0]["content"])], heldout)
    assert part["unindexed"] == 3 and part["ngram"] == 2
    assert part["exact"] == 1, "what is a copy as a whole is found past the index too"
    assert "3 tasks are past the 20 word sequences that are indexed" in part["headline"]
    short = [row(f"s{n}", f"What is {n} + 1?") for n in range(50)]
    assert scan(parts, short)["unindexed"] == 0, "tasks too short to have a sequence miss nothing"


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_can_be_compared_and_a_copy_is_always_exact(prompt: str, answer: str):
    exam = row("h", prompt, answer)
    kinds = [kind for kind, part, _ in found(row("t", prompt, answer), exam) if part == "prompt"]
    assert kinds == (["exact"] if tokens_of(prompt.strip()) else [])
