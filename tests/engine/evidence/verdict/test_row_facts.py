"""What is counted on the rows of a run, by hand."""

from typing import Any

from engine.evidence.verdict.contamination import Contamination
from engine.evidence.verdict.row_facts import facts_of_rows


def row(prompt: str, answer: str = "", split: str = "train", **metadata: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    reply = [{"role": "assistant", "content": answer}] if answer else None
    return {"prompt": messages, "answer": reply, "split": split, "metadata": metadata}


def facts(*rows: dict[str, Any]):
    return facts_of_rows(rows, Contamination())


def test_rows_that_answer_one_prompt_in_two_ways_contradict_each_other():
    counted = facts(
        row("2 + 2", "4"),
        row("2  + 2", "5"),  # blanks make no other prompt
        row("3 + 3", "6"),
        row("3 + 3", " 6"),  # the same answer
        row("2 + 2", "7", split="heldout"),
    )
    assert (counted.train, counted.contradicted, counted.different) == (4, 2, 3)


def test_a_pair_is_alike_where_only_blanks_case_or_signs_differ():
    counted = facts(
        row("a", chosen="Yes.", rejected="yes "),
        row("b", chosen="Yes", rejected="No"),
        row("c", "12", rejected=[{"role": "assistant", "content": "12!"}]),
        row("d", "12"),
    )
    assert (counted.pairs, counted.alike_pairs) == (3, 2)


def test_words_of_the_exam_are_those_usual_there_and_rare_in_training():
    train = [row(f"add {n} please") for n in range(100)]
    heldout = [row(f"sum {n} please", split="heldout") for n in range(19)]
    heldout += [row("sum of pears please", split="heldout")]  # a word of one task
    assert facts(*train, *heldout).exam_words == ("sum",)
    assert facts(*train[:19], *heldout).exam_words == ()  # too few to tell
