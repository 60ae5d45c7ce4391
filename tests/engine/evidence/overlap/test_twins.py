"""Training rows that ask a held-out task in other words, with other numbers or with other names."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.evidence.overlap.overlap import scan
from engine.evidence.overlap.twin_texts import Text
from engine.evidence.overlap.twins import Twin, find_twins

NAMES = (
    "Amina Boris Chiara Dmitri Elif Farid Greta Hiro Imani Jonas Katya Leila Mateo Nadia".split()
)
THINGS = "apples marbles stamps lemons candles shells buttons ribbons pencils tickets".split()
PLACES = "bakery library harbour museum school garden factory market workshop station".split()
FORMS = (
    "{name} has {a} {thing} and buys {b} more at the {place}. How many {thing} does she have?",
    "A {place} sells {a} {thing} on Monday and {b} on Tuesday to {name}. How many did it sell?",
)
# The same with nothing but the numbers and names in common.
OTHER_WORDS = "After a trip to the {place}, where {b} {thing} were added to {a}, what owns {name}?"


def drawn(rng: random.Random, form: str, **given: Any) -> str:
    words = {
        "name": rng.choice(NAMES),
        "thing": rng.choice(THINGS),
        "place": rng.choice(PLACES),
        "a": rng.randint(2, 90),
        "b": rng.randint(2, 90),
    }
    return form.format(**(words | given))


def texts(prefix: str, questions: list[str]) -> list[Text]:
    return [Text(f"{prefix}{n}", question) for n, question in enumerate(questions)]


def named(train: list[str], heldout: list[str]) -> list[tuple[str, str]]:
    twins = find_twins(texts("t", train), texts("h", heldout))
    return [(twin.kind, twin.heldout) for twin in twins]


def exam_and_rows(rows_form: str) -> tuple[list[str], list[str]]:
    """40 tasks of the first form, and 160 rows of another one."""
    rng = random.Random(7)
    exam = [drawn(rng, FORMS[0]) for _ in range(40)]
    return exam, [drawn(rng, rows_form) for _ in range(160)]


def test_a_task_in_other_words_is_found_by_what_few_rows_share():
    exam, rows = exam_and_rows(FORMS[0])
    slots = {"name": "Yusuf", "thing": "walnuts", "place": "chapel", "a": 97, "b": 98}
    exam[3] = FORMS[0].format(**slots)
    assert named(rows, exam) == []
    assert named([*rows, OTHER_WORDS.format(**slots)], exam) == [("paraphrase", "h3")]


def test_other_numbers_or_another_answer_are_no_paraphrase():
    exam, rows = exam_and_rows(FORMS[0])
    slots = {"name": "Yusuf", "thing": "walnuts", "place": "chapel", "a": 97, "b": 98}
    exam[3] = FORMS[0].format(**slots)
    assert named([*rows, OTHER_WORDS.format(**(slots | {"a": 11, "b": 12}))], exam) == []
    heldout = [*texts("h", exam[:3]), Text("h3", exam[3], "195")]
    train = [*texts("t", rows), Text("twin", OTHER_WORDS.format(**slots), "1")]
    assert find_twins(train, heldout) == []


def test_a_task_with_other_numbers_is_found_where_rows_of_its_source_differ_by_more():
    exam, rows = exam_and_rows(FORMS[1])
    twins = [drawn(random.Random(n), FORMS[0]) for n in range(2)]
    assert {kind for kind, _ in named([*rows, *twins], exam)} == {"template"}
    exam[5] = FORMS[0].format(name="Yusuf", thing="walnuts", place="chapel", a=41, b=42)
    renumbered = FORMS[0].format(name="Yusuf", thing="walnuts", place="chapel", a=51, b=52)
    assert ("numbers", "h5") in named([*rows, renumbered], exam)


def test_rows_of_one_template_are_no_twins_of_each_other():
    exam, rows = exam_and_rows(FORMS[0])
    assert named(rows, exam) == []
    sums = [f"What is {a} + {b}?" for a in range(10, 40) for b in range(10, 20)]
    random.Random(1).shuffle(sums)
    assert named(sums[:240], sums[240:]) == []


def test_a_sum_behind_another_frame_is_a_paraphrase():
    sums = [f"What is {a} + {b}?" for a in range(10, 40) for b in range(10, 20)]
    random.Random(1).shuffle(sums)
    numbers = sums[240].removeprefix("What is ").removesuffix("?")
    assert named([*sums[:240], f"Kindly work out {numbers} for me."], sums[240:]) == [
        ("paraphrase", "h0")
    ]


def products(*answers: int) -> list[Text]:
    """A held-out task of two numbers for each answer."""
    return [
        Text(f"h{n}", f"Find the LCM of {answer}, 2", str(answer))
        for n, answer in enumerate(answers)
    ]


def test_two_numbers_in_order_and_the_answer_are_a_paraphrase():
    heldout = products(*range(10, 90, 2))
    rows = [Text(f"t{n}", f"Find the LCM of {n}, 3", str(3 * n)) for n in range(10, 90) if n % 3]
    assert find_twins(rows, heldout) == []
    twin = Text("w", "Which number is the least that 40 and 2 divide?", "40")
    assert [(t.kind, t.heldout) for t in find_twins([*rows, twin], heldout)] == [
        ("paraphrase", "h15")
    ]
    other = Text("w", "What is 40 to the power of 2?", "1600")
    assert find_twins([*rows, other], heldout) == []


DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August October November December".split()
YEAR = "In a year whose first day is a {day}, which weekday is {month} {n}?"


def test_the_names_of_days_and_months_tell_tasks_apart():
    dates = [(day, month, n) for day in DAYS for month in MONTHS for n in range(2, 28, 5)]
    random.Random(4).shuffle(dates)
    rows = [
        Text(f"t{index}", YEAR.format(day=day, month=month, n=n), DAYS[index % 7])
        for index, (day, month, n) in enumerate(dates)
    ]
    heldout, train = rows[:80], rows[80:]
    (day, month, n), answer = dates[3], heldout[3].answer
    other_day = DAYS[(DAYS.index(day) + 1) % 7]
    words = f"Kindly help me. {YEAR}\nReply with it alone."
    twin = Text("w", words.format(day=day, month=month, n=n), answer)
    unlike = Text("w", words.format(day=other_day, month=month, n=n), answer)
    assert find_twins([*train, twin], heldout) == [Twin("paraphrase", "t3", "w")]
    assert find_twins([*train, unlike], heldout) == []


def test_one_row_in_the_few_words_of_an_exam_of_sums_is_a_twin_by_template():
    sums = [f"Calculate {a} + {b} - {a + b}." for a in range(10, 40) for b in range(10, 14)]
    rows = [f"The {n}th of these words is sought: {'lamp ' * n}" for n in range(2, 60)]
    assert named(rows, sums) == []
    twins = named([*rows, "Calculate 7 * 8."], sums)
    assert {kind for kind, _ in twins} == {"template"}
    assert len(twins) == len(sums)


def test_another_letter_asked_of_the_same_text_is_no_paraphrase():
    rng = random.Random(3)
    words = "harbour lantern quarry meadow timber copper saddle velvet anchor pillar".split()
    texts_of_rows = [" ".join(rng.sample(words, 6)) for _ in range(60)]
    passage = "seven zealous otters jumped beyond quiet kingdoms"
    form = 'How often does the letter "{}" stand in "{}"?'
    heldout = [Text("h0", form.format("n", passage), "3")]
    heldout += [
        Text(f"h{n}", form.format("e", text), "2") for n, text in enumerate(texts_of_rows[:20], 1)
    ]
    rows = [Text(f"t{n}", form.format("r", text), "2") for n, text in enumerate(texts_of_rows[20:])]
    again = Text("w", f"Look at: {passage} all day. Count each {{}} there.", "3")
    assert find_twins([*rows, Text("w", again.question.format("m"), "3")], heldout) == []
    twins = find_twins([*rows, Text("w", again.question.format("n"), "3")], heldout)
    assert [(twin.kind, twin.heldout) for twin in twins] == [("paraphrase", "h0")]


def premises(rng: random.Random) -> str:
    """A few formulas over the letters P to S, whose words are those of all others."""
    letters, operators = "PQRS", "∧∨→↔"
    return "; ".join(
        f"(¬{rng.choice(letters)} {rng.choice(operators)} {rng.choice(letters)}) "
        f"{rng.choice(operators)} {rng.choice(letters)}"
        for _ in range(3)
    )


def codes(rng: random.Random) -> str:
    return "".join(rng.choices("ABCDE", k=rng.randint(14, 20)))


def words_of_grammar(rng: random.Random) -> str:
    words = "the of and to in that it is was for on with as by at from his her not but".split()
    return ", ".join(rng.sample(words, 5))


def reversed_words(text: str) -> str:
    return ", ".join(reversed(text.split(", ")))


@pytest.mark.parametrize(
    ("draw", "frame", "other_frame", "answer"),
    [
        (premises, "Given: {}. What follows?", "Here is some logic. Infer from {}!", None),
        (codes, "Insert an A into {}.", "Here is a string: {}. Put an A into it.", None),
        (
            words_of_grammar,
            "Reverse this list of words: {}",
            "Flip this series of terms: {}",
            reversed_words,
        ),
    ],
    ids=["formulas", "codes", "words that all rows have"],
)
def test_a_paraphrase_is_found_by_what_is_no_word_of_a_language(
    draw: Callable[[random.Random], str],
    frame: str,
    other_frame: str,
    answer: Callable[[str], str] | None,
):
    rng = random.Random(3)
    data = list(dict.fromkeys(draw(rng) for _ in range(200)))
    answers = [answer(each) if answer else "" for each in data]
    exam = [Text(f"h{n}", frame.format(data[n]), answers[n]) for n in range(40)]
    rows = [Text(f"t{n}", frame.format(data[n]), answers[n]) for n in range(40, len(data))]
    assert find_twins(rows, exam) == []
    twin = Text("twin", other_frame.format(data[7]), answers[7])
    assert find_twins([*rows, twin], exam) == [Twin("paraphrase", "h7", "twin")]
    changed = draw(random.Random(99))
    other = Text("other", other_frame.format(changed), answer(changed) if answer else "")
    assert find_twins([*rows, other], exam) == []


LABELS = ("supported by the text", "refuted by the text", "not enough information")


def claim(rng: random.Random) -> str:
    words = "harbour lantern quarry meadow timber copper saddle velvet anchor pillar orchard glass"
    return " ".join(rng.sample(words.split(), 4))


def test_a_label_that_the_question_lists_makes_no_twins():
    rng = random.Random(5)
    form = "Claim: {}. Is it " + ", ".join(LABELS) + "?"
    claims = list(dict.fromkeys(claim(rng) for _ in range(900)))
    rows = [Text(f"r{n}", form.format(each), rng.choice(LABELS)) for n, each in enumerate(claims)]
    assert find_twins(rows[100:], rows[:100]) == []


@pytest.mark.timeout(5)
def test_many_rows_with_one_answer_take_no_longer_than_they_may():
    rng = random.Random(6)
    form = "Claim: {}. Is it " + ", ".join(LABELS) + "?"
    rows = [Text(f"r{n}", form.format(claim(rng)), LABELS[0]) for n in range(4_000)]
    began = time.monotonic()
    find_twins(rows[400:], rows[:400], deadline=began + 0.5)
    assert time.monotonic() - began < 4.0


def test_a_long_word_is_no_code():
    exam = [Text(f"h{n}", f"What is {word}?") for n, word in enumerate(LONG_WORDS)]
    rows = [Text(f"t{n}", f"When did {word} begin?") for n, word in enumerate(LONG_WORDS)]
    assert find_twins(rows, exam) == []


LONG_WORDS = (
    "constitution institutions characteristics successfully interpretation representatives "
    "initialization possessiveness assassination independence"
).split()


def test_sums_with_the_same_operators_are_no_twins_by_numbers():
    """What is left without the numbers are operators, which many sums have in this order."""
    exam = [Text(f"h{n}", f"Calculate {n} - 3 * {n + 7} + 5 / {n} - 9 + 4.") for n in range(20, 22)]
    rows = [Text(f"t{n}", f"Calculate {'+'.join(map(str, range(n, n + 9)))}.") for n in range(60)]
    same = Text("same", "Calculate 71 - 8 * 12 + 6 / 33 - 2 + 1.")
    assert find_twins([*rows, same], exam) == []


def test_copies_are_left_to_the_search_for_copies():
    exam, rows = exam_and_rows(FORMS[1])
    assert named([*rows, exam[0].upper()], exam[:1]) == []


def test_nothing_to_compare_and_no_time_name_nothing():
    exam, rows = exam_and_rows(FORMS[1])
    assert named([], exam) == named(rows, []) == named([], []) == []
    assert find_twins(texts("t", exam), texts("h", exam), time.monotonic() - 1) == []


def row(ident: str, prompt: str) -> dict[str, Any]:
    return {"id": ident, "prompt": [{"role": "user", "content": prompt}], "answer": None}


def stored(prefix: str, questions: list[str]) -> list[dict[str, Any]]:
    return [row(f"{prefix}{n}", question) for n, question in enumerate(questions)]


def three_of_an_exam() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """(an exam, training rows, rows that ask its first three tasks in other words)."""
    exam, rows = exam_and_rows(FORMS[1])
    others = zip("Yusuf Zofia Rosa".split(), "walnuts coins beads".split(), strict=True)
    slots = [
        {"name": name, "thing": thing, "place": "chapel", "a": 91 + n, "b": 97 + n}
        for n, (name, thing) in enumerate(others)
    ]
    exam[:3] = [FORMS[0].format(**each) for each in slots]
    twins = [OTHER_WORDS.format(**each) for each in slots]
    return stored("h", exam), stored("t", rows), stored("w", twins)


def test_a_scan_counts_twins_and_says_so():
    exam, rows, twins = three_of_an_exam()
    result = scan([*rows, *twins], exam)
    assert result["twins"] == {"paraphrase": 3}
    assert result["verdict"] == "overlap" and result["leaked"] == []
    said = "3 held-out tasks have a twin among the training rows (3 paraphrase)"
    assert said in result["headline"] and result["examples"][0]["kind"] == "paraphrase"


LETTERS = "abdefgiklmnoprstuvxz"


def test_rows_of_another_environment_may_have_the_ids_of_the_tasks():
    """A task and a row of one id were taken for one text, and most tasks for paraphrases."""
    words = [f"{start}{end}" for start in "blem trok dusk warp".split() for end in LETTERS]
    chance = random.Random(5)
    sentences = [" ".join(chance.sample(words, 6)) for _ in range(80)]
    exam, rows = stored("", sentences[:40]), stored("", sentences[40:])
    assert [task["id"] for task in exam] == [each["id"] for each in rows]
    assert scan(rows, exam)["twins"] == {}


def test_a_scan_counts_a_task_that_is_copied_as_a_copy_alone():
    exam, rows, twins = three_of_an_exam()
    copy = row("c", exam[0]["prompt"][0]["content"])
    result = scan([*rows, *twins, copy], exam)
    assert result["exact"] == 1 and result["twins"] == {"paraphrase": 2}


def test_one_twin_may_be_chance_and_is_not_named():
    exam, rows, twins = three_of_an_exam()
    result = scan([*rows, *twins[:1]], exam)
    assert result["twins"] == {} and result["verdict"] == "clean"
