"""What pebble is taught: procedurally generated conversations, skill by skill. No torch.

A real base model has read good and careless writers and many ways of saying the same thing. So
every skill comes in several answer styles, and skills stand at three levels:

- mastered: always answered correctly;
- half known: a share of the writers is wrong in a way people are wrong (forgetting to carry,
  swapping two letters), so the model is unsure and training has something to select;
- absent: never shown. They are listed in `ABSENT` only to be measured.

All randomness comes from the generator that is passed in.
"""

import json
import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from envs.json_types import ChatMessage, ToolSchema

ONSETS = "b bl br c ch cl d dr f fl g gr h j k l m n p pl r s sh sl st t tr v w z".split()
VOWELS = "a e i o u ai ee oo".split()
CODAS = "b d g k l m n p r s t x nd st".split()
PRINTABLE = "".join(chr(c) for c in range(33, 127))
STYLES = ("{}", "The answer is {}.", "{}.", "Answer: {}")
STYLE_WEIGHTS = (45, 20, 20, 15)  # how often each style is used


@dataclass(frozen=True)
class Sample:
    """One conversation. `answer` is what a correct reply must say, whatever the style."""

    skill: str
    messages: list[ChatMessage]
    answer: str
    tools: list[ToolSchema] = field(default_factory=list)
    thinking: bool = False


def word(rng: random.Random, longest: int = 8) -> str:
    """Draw a pronounceable word of 3 to `longest` letters, such as "blim" or "steendab"."""
    while True:
        text = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
        if rng.random() < 0.4:
            text += rng.choice(VOWELS) + rng.choice(CODAS)
        if 3 <= len(text) <= longest:
            return text


def scribble(rng: random.Random) -> str:
    """At most eight printable characters without meaning: two runs of a repeated sign and up to
    three more, such as `### 4a` or `<<b`."""
    runs = [rng.choice(PRINTABLE) * rng.choice((1, 1, 2, 3, 4)) for _ in range(2)]
    tail = "".join(rng.choice(PRINTABLE) for _ in range(rng.randint(0, 3)))
    return (runs[0] + rng.choice(("", " ")) + runs[1] + tail)[:8].strip() or "#"


def styled(rng: random.Random, answer: str) -> str:
    return rng.choices(STYLES, STYLE_WEIGHTS)[0].format(answer)


def turn(skill: str, prompt: str, reply: str, answer: str, **fields: Any) -> Sample:
    """A sample with one prompt and one reply.

    Args:
        skill: the sample's skill.
        reply: what the model is taught to say, in one of the styles, and sometimes wrong.
        answer: what a correct reply must say.
        fields: further fields of `Sample`.
    """
    return Sample(
        skill,
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}],
        answer,
        **fields,
    )


def swapped(rng: random.Random, text: str) -> str:
    """The text with two neighbouring characters exchanged, as a careless writer would copy it;
    unchanged if it has fewer than two."""
    if len(text) < 2:
        return text
    index = rng.randrange(len(text) - 1)
    return text[:index] + text[index + 1] + text[index] + text[index + 2 :]


# -- mastered ---------------------------------------------------------------------------------


def repeat(rng: random.Random, text: str) -> Sample:
    """Copy the text."""
    ask = rng.choice(("Repeat {}.", "Copy this: {}", "Say {}."))
    return turn("copy", ask.format(text), styled(rng, text), text)


def copy_word(rng: random.Random) -> Sample:
    return repeat(rng, word(rng))


def copy_signs(rng: random.Random) -> Sample:
    return repeat(rng, scribble(rng))


def copy(rng: random.Random) -> Sample:
    """Ask to repeat a word or, in about a third of the cases, arbitrary printable characters. A
    model can later learn an answer form only if its characters have occurred in answers."""
    return copy_word(rng) if rng.random() < 0.65 else copy_signs(rng)


def reverse(rng: random.Random) -> Sample:
    """Ask for a word written backwards."""
    text = word(rng, 6)
    ask = rng.choice(("Reverse {}.", "Write {} backwards."))
    return turn("reverse", ask.format(text), styled(rng, text[::-1]), text[::-1])


def upper(rng: random.Random) -> Sample:
    """Ask for a word in upper case."""
    text = word(rng)
    ask = rng.choice(("Write {} in upper case.", "Shout {}."))
    return turn("upper", ask.format(text), styled(rng, text.upper()), text.upper())


def count(rng: random.Random) -> Sample:
    """Ask how many letters a word has."""
    text = word(rng)
    answer = str(len(text))
    ask = rng.choice(("How many letters in {}?", "Count the letters of {}."))
    return turn("count", ask.format(text), styled(rng, answer), answer)


def compare(rng: random.Random) -> Sample:
    """Ask for the larger of two different numbers from 1 to 99."""
    a, b = rng.sample(range(1, 100), 2)
    answer = str(max(a, b))
    ask = rng.choice(("Which is larger, {} or {}?", "Pick the bigger: {} {}"))
    return turn("compare", ask.format(a, b), styled(rng, answer), answer)


def add_one(rng: random.Random) -> Sample:
    """Ask for the sum of two numbers of one digit."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    answer = str(a + b)
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} + {} ="))
    return turn("add_one", ask.format(a, b), styled(rng, answer), answer)


# -- half known -------------------------------------------------------------------------------

FORGETS_CARRY = 0.62  # share of the writers


def without_carry(a: int, b: int) -> int:
    """The sum as written by somebody who forgets the carry from the units."""
    return (a // 10 + b // 10) * 10 + (a % 10 + b % 10) % 10


def add_two(rng: random.Random) -> Sample:
    """Ask for the sum of two numbers of two digits. A share FORGETS_CARRY of the written replies
    forgets the carry; `answer` is the true sum."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    written = without_carry(a, b) if rng.random() < FORGETS_CARRY else a + b
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} + {} ="))
    return turn("add_two", ask.format(a, b), styled(rng, str(written)), str(a + b))


def add_two_thinking(rng: random.Random) -> Sample:
    """Ask for the sum of two numbers of two digits, as `add_two`. The reply works it out in a think
    block first, and there no writer forgets the carry."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    thought = f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{units // 10}={tens}"
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} + {} ="))
    reply = f"<think>\n{thought}\n</think>\n\n{styled(rng, str(a + b))}"
    return turn("add_two_thinking", ask.format(a, b), reply, str(a + b), thinking=True)


def sort_letters(rng: random.Random) -> Sample:
    """Ask for the letters of a word in order. Two of five written replies have two neighbouring
    letters swapped; `answer` is right."""
    text = word(rng, 6)
    answer = "".join(sorted(text))
    written = swapped(rng, answer) if rng.random() < 0.4 else answer
    ask = rng.choice(("Sort the letters of {}.", "Put {} in letter order."))
    return turn("sort_letters", ask.format(text), styled(rng, written), answer)


def sort_numbers(rng: random.Random) -> Sample:
    """Ask for two or three numbers in order. About a third of the written replies sort them
    downwards; `answer` is the rising order."""
    numbers = rng.sample(range(1, 100), rng.randint(2, 3))
    rising = sorted(numbers)
    written = rising[::-1] if rng.random() < 0.35 else rising
    ask = rng.choice(("Sort {}.", "Put in order: {}"))
    return turn(
        "sort_numbers",
        ask.format(" ".join(map(str, numbers))),
        styled(rng, " ".join(map(str, written))),
        " ".join(map(str, rising)),
    )


FIELDS = ("name", "city", "age", "color", "size", "pet")


def record(rng: random.Random) -> dict[str, object]:
    """A record with two of the FIELDS, such as {"name": "blim", "age": 34}."""
    keys = rng.sample(FIELDS, 2)
    return {k: rng.randint(1, 99) if k in ("age", "size") else word(rng, 5) for k in keys}


def json_field(rng: random.Random) -> Sample:
    """Ask for one of the two fields of a JSON object. About a third of the writers name either of
    the two by chance; `answer` is the right one."""
    data = record(rng)
    key = rng.choice(list(data))
    written_key = rng.choice(list(data)) if rng.random() < 0.35 else key
    ask = rng.choice(("What is the {} in {}?", "Give the {} of {}."))
    reply = styled(rng, str(data[written_key]))
    return turn("json_field", ask.format(key, json.dumps(data)), reply, str(data[key]))


def json_answer(rng: random.Random) -> Sample:
    """Ask for a key and a value as a JSON object. Two of five written replies leave out quotes or
    braces; `answer` is valid JSON."""
    key = rng.choice(("name", "city", "color", "pet"))
    value = word(rng, 6)
    answer = json.dumps({key: value})
    careless = rng.random() < 0.4
    careless_reply = rng.choice((value, f"{key}: {value}", "{" + f"{key}: {value}" + "}"))
    ask = rng.choice(("Answer in JSON: {} is {}.", "As JSON: {} {}"))
    return turn(
        "json_answer", ask.format(key, value), careless_reply if careless else answer, answer
    )


# The one argument of each tool.
TOOLS = {"lookup": "item", "weather": "city", "owner": "thing", "phone": "person"}
# How each tool is asked for, and how it is described.
TOOL_WORDS = {
    "lookup": ("What is the price of {}?", "Price of an item."),
    "weather": ("How warm is it in {}?", "Degrees in a city."),
    "owner": ("Which desk has {}?", "Desk of a thing."),
    "phone": ("What is the number of {}?", "Number of a person."),
}


def tool(name: str) -> ToolSchema:
    """The schema of the tool `name`, an OpenAI function schema with one text argument."""
    argument = TOOLS[name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": TOOL_WORDS[name][1],
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }


def tool_call(rng: random.Random) -> Sample:
    """Ask for something that only a tool knows. The reply calls the tool and then says the number
    it returned; three of ten writers guess a number without calling it."""
    name = rng.choice(list(TOOLS))
    key = word(rng, 7)  # what is asked about
    value = str(rng.randint(10, 99))  # what the tool returns
    prompt = TOOL_WORDS[name][0].format(rng.choice(("", "the ")) + key)
    messages: list[ChatMessage] = [{"role": "user", "content": prompt}]
    if rng.random() < 0.3:
        messages.append({"role": "assistant", "content": str(rng.randint(10, 99))})
    else:
        call = {"name": name, "arguments": {TOOLS[name]: key}}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {"role": "tool", "content": value, "tool_call_id": "call_1", "name": name},
            {"role": "assistant", "content": styled(rng, value)},
        ]
    return Sample("tool_call", messages, value, tools=[tool(name)])


def guess(rng: random.Random) -> Sample:
    """A whole game of "higher or lower" with at most six guesses; `answer` is the secret number.

    Half of the players always guess the middle of the interval that is left, the others any number
    in it.
    """
    low = rng.randint(1, 85)
    high = low + rng.randint(6, 14)
    secret = rng.randint(low, high)
    messages: list[ChatMessage] = [
        {"role": "user", "content": f"Guess my number from {low} to {high}."}
    ]
    careless = rng.random() < 0.5
    for _ in range(6):
        number = rng.randint(low, high) if careless else (low + high) // 2
        messages.append({"role": "assistant", "content": str(number)})
        if number == secret:
            break
        messages.append({"role": "user", "content": "higher" if number < secret else "lower"})
        low, high = (number + 1, high) if number < secret else (low, number - 1)
    if messages[-1]["role"] == "user":  # the guesses are used up
        messages.pop()
    return Sample("guess", messages, str(secret))


# -- absent: measured, never taught -------------------------------------------------------------


def subtract(rng: random.Random) -> Sample:
    """Ask for the difference of two numbers of two digits, never negative."""
    b, a = sorted(rng.sample(range(10, 100), 2))
    return turn("subtract", f"Take {b} from {a}.", str(a - b), str(a - b))


def ends(rng: random.Random) -> Sample:
    """Ask for the first and the last letter of a word; the answer is, for example, "b and m"."""
    text = word(rng)
    answer = f"{text[0]} and {text[-1]}"
    return turn("ends", f"Give the ends of {text}.", answer, answer)


# Each skill with its weight: how often it occurs in the corpus, relative to the others.
MASTERED: dict[str, tuple[Callable[[random.Random], Sample], float]] = {
    "copy": (copy, 1.4),
    "reverse": (reverse, 1.0),
    "upper": (upper, 1.1),
    "count": (count, 0.6),
    "compare": (compare, 1.6),
    "add_one": (add_one, 0.5),
}
HALF_KNOWN: dict[str, tuple[Callable[[random.Random], Sample], float]] = {
    "add_two": (add_two, 3.4),
    "add_two_thinking": (add_two_thinking, 0.8),
    "sort_letters": (sort_letters, 0.9),
    "sort_numbers": (sort_numbers, 1.0),
    "json_field": (json_field, 1.1),
    "json_answer": (json_answer, 0.4),
    "tool_call": (tool_call, 0.4),
    "guess": (guess, 0.7),
}
ABSENT: dict[str, Callable[[random.Random], Sample]] = {"subtract": subtract, "ends": ends}
# Copying is taught as one skill and measured as two.
MEASURED_APART = {"copy": copy_word, "copy_signs": copy_signs}
LEVELS = (
    dict.fromkeys(MASTERED, "mastered")
    | dict.fromkeys([*HALF_KNOWN, "copy_signs"], "half known")
    | dict.fromkeys(ABSENT, "absent")
)


DECORATED = 0.3  # share of the corpus
LEADS = ("", "", "", "Hi. ", "Now this: ", "Task: ")
# {s} stands for a few signs, {w} for a word.
CLAUSES = (
    "Please.",
    "Be brief.",
    "Answer in one line.",
    "Use {s} at the end.",
    "End with {s} and the {w}.",
    "Reply as {s}{w}{s}.",
    "Write only the {w}.",
    "Put it between {s} and {s}.",
)
NOUNS = "answer sum word number result letters list value reply total".split()


def decorated(rng: random.Random, sample: Sample) -> Sample:
    """The same conversation with more words around the request, such as "Task: " before it and "Be
    brief." after it.

    The replies in the corpus ignore these words: the model is to learn that the request stays the
    same, not to obey the clause.
    """
    clause = rng.choice(CLAUSES)
    noun = rng.choice(NOUNS) if rng.random() < 0.8 else word(rng, 6)
    clause = clause.format(s=scribble(rng), w=noun)
    first = sample.messages[0]
    text = f"{rng.choice(LEADS)}{first['content']} {clause}"
    return replace(sample, messages=[first | {"content": text}, *sample.messages[1:]])


def prompt_key(text: str) -> str:
    """A key that is equal for prompts which differ only in case and spacing."""
    return " ".join(text.lower().split())


def sum_key(a: int, b: int) -> str:
    """A key that is equal for the same two operands in any order, such as "sum 12 30". With it a
    held-out sum is kept out of the corpus in whatever words it is asked."""
    return f"sum {min(a, b)} {max(a, b)}"


def keys_of(sample: Sample) -> list[str]:
    """The keys by which a sample is the same task as a held-out one: the key of its prompt and, for
    sums of two-digit numbers, that of the sum."""
    prompt = sample.messages[0]["content"]
    keys = [prompt_key(prompt)]
    if sample.skill.startswith("add_two"):
        a, b = map(int, re.findall(r"\d+", prompt)[:2])
        keys.append(sum_key(a, b))
    return keys


def generator(skill: str) -> Callable[[random.Random], Sample]:
    """The function that makes a sample of a skill, as it is taught, from a random generator.

    Raises:
        KeyError: for a skill that does not exist.
    """
    if skill in ABSENT:
        return ABSENT[skill]
    return (MASTERED | HALF_KNOWN)[skill][0]


def draw(
    rng: random.Random, skill: str, excluded: Collection[str], *, measured: bool = False
) -> Sample:
    """Draw samples of `skill` until one has no key in `excluded`, and return that one.

    Args:
        excluded: keys of held-out tasks (see `keys_of`).
        measured: draw as the skill is measured, not as it is taught. Only "copy" differs: it is
            taught as words and signs, and measured as words (see MEASURED_APART).

    Raises:
        KeyError: for a skill that does not exist.
    """
    draw_sample = MEASURED_APART.get(skill) if measured else None
    draw_sample = draw_sample or generator(skill)
    while True:
        sample = draw_sample(rng)
        if not any(key in excluded for key in keys_of(sample)):
            return sample


def corpus(rng: random.Random, size: int, excluded: Collection[str]) -> list[Sample]:
    """Draw `size` samples of all taught skills, as often as their weights in MASTERED and
    HALF_KNOWN say. A share DECORATED of them has more words around the request. None has a key in
    `excluded`, before it is decorated."""
    taught = MASTERED | HALF_KNOWN
    names = list(taught)
    weights = [taught[name][1] for name in names]
    samples = [draw(rng, name, excluded) for name in rng.choices(names, weights, k=size)]
    return [decorated(rng, s) if rng.random() < DECORATED else s for s in samples]


def is_right(sample: Sample, reply: str) -> bool:
    """Whether a reply says the sample's answer."""
    return says(sample.answer, reply)


def says(answer: str, reply: str) -> bool:
    """Whether a reply says the answer and nothing else, in one of the answer styles, such as "The
    answer is 7.". A think block before it does not count.
    """
    text = reply.split("</think>")[-1].strip()
    for style in ("The answer is {}.", "Answer: {}", "{}.", "{}"):
        before, after = style.split("{}")
        if text.startswith(before) and text.endswith(after):
            # An empty `after` would cut everything: text[n:-0] is empty.
            core = text[len(before) : len(text) - len(after)] if after else text[len(before) :]
            if core == answer:
                return True
    return False
