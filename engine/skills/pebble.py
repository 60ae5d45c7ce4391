"""What pebble, the built-in base model, is taught: procedurally generated conversations, skill by
skill. No torch.

A real base model has read good and careless writers and many ways of saying the same thing. So
every skill comes in several answer styles, and at one of three levels:

- mastered: always answered correctly;
- half known: a share of the writers makes typical human mistakes (forgetting to carry, swapping two
  letters), so the model is unsure and training has something to select;
- absent: never shown. The skills in `ABSENT` are only measured.

All randomness comes from the generator that is passed in.
"""

import json
import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from engine.models.reasoning import after_thought
from envs.json_types import ChatMessage, JsonObject, ToolSchema

ONSETS = "b bl br c ch cl d dr f fl g gr h j k l m n p pl r s sh sl st t tr v w z".split()
VOWELS = "a e i o u ai ee oo".split()
CODAS = "b d g k l m n p r s t x nd st".split()
PRINTABLE = "".join(chr(c) for c in range(33, 127))
STYLES = ("{}", "The answer is {}.", "{}.", "Answer: {}")
STYLE_WEIGHTS = (45, 20, 20, 15)  # how often each style is used


@dataclass(frozen=True)
class Sample:
    """One conversation of the corpus.

    Attributes:
        skill: the skill that it teaches.
        messages: the conversation.
        answer: what a correct reply must say, whatever the style.
        tools: the tools that the model may call in it.
        thinking: whether its reply has a think block.
    """

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
    """Draw at most eight meaningless printable characters, e.g. `### 4a` or `<<b`: two runs of a
    repeated sign, with or without a space between them, and up to three more signs."""
    first, second = (rng.choice(PRINTABLE) * rng.choice((1, 1, 2, 3, 4)) for _ in range(2))
    tail = "".join(rng.choice(PRINTABLE) for _ in range(rng.randint(0, 3)))
    return (first + rng.choice(("", " ")) + second + tail)[:8]


def in_random_style(rng: random.Random, answer: str) -> str:
    """Return the answer in one of the STYLES, e.g. "The answer is 7."."""
    return rng.choices(STYLES, STYLE_WEIGHTS)[0].format(answer)


def one_turn(skill: str, prompt: str, *, reply: str, answer: str, **fields: Any) -> Sample:
    """Make a sample with one prompt and one reply.

    Args:
        skill: the sample's skill.
        prompt: what the user asks.
        reply: what the model is taught to say: in one of the styles, and sometimes wrong.
        answer: what a correct reply must say.
        fields: other fields of `Sample`, by name.
    """
    return Sample(
        skill,
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}],
        answer,
        **fields,
    )


def with_swapped_letters(rng: random.Random, text: str) -> str:
    """Return the text with two neighbouring characters exchanged, as a careless writer would copy
    it; unchanged if it has fewer than two characters."""
    if len(text) < 2:
        return text
    index = rng.randrange(len(text) - 1)
    return text[:index] + text[index + 1] + text[index] + text[index + 2 :]


# -- mastered ---------------------------------------------------------------------------------


def repeat(rng: random.Random, text: str) -> Sample:
    """Make a sample that asks to copy the text."""
    ask = rng.choice(("Repeat {}.", "Copy this: {}", "Say {}."))
    return one_turn("copy", ask.format(text), reply=in_random_style(rng, text), answer=text)


def copy_word(rng: random.Random) -> Sample:
    """Make a sample that asks to copy a word."""
    return repeat(rng, word(rng))


def copy_signs(rng: random.Random) -> Sample:
    """Make a sample that asks to copy arbitrary printable characters."""
    return repeat(rng, scribble(rng))


def copy(rng: random.Random) -> Sample:
    """Make a sample that asks to copy a word or, in about a third of the cases, arbitrary printable
    characters.

    Those are taught because a model can later learn an answer format only if it has written the
    format's characters before.
    """
    return copy_word(rng) if rng.random() < 0.65 else copy_signs(rng)


def reverse(rng: random.Random) -> Sample:
    """Make a sample that asks for a word written backwards."""
    text = word(rng, longest=6)
    answer = text[::-1]
    ask = rng.choice(("Reverse {}.", "Write {} backwards."))
    reply = in_random_style(rng, answer)
    return one_turn("reverse", ask.format(text), reply=reply, answer=answer)


def upper(rng: random.Random) -> Sample:
    """Make a sample that asks for a word in upper case."""
    text = word(rng)
    answer = text.upper()
    ask = rng.choice(("Write {} in upper case.", "Shout {}."))
    return one_turn("upper", ask.format(text), reply=in_random_style(rng, answer), answer=answer)


def count(rng: random.Random) -> Sample:
    """Make a sample that asks how many letters a word has."""
    text = word(rng)
    answer = str(len(text))
    ask = rng.choice(("How many letters in {}?", "Count the letters of {}."))
    return one_turn("count", ask.format(text), reply=in_random_style(rng, answer), answer=answer)


def compare(rng: random.Random) -> Sample:
    """Make a sample that asks for the larger of two different numbers from 1 to 99."""
    a, b = rng.sample(range(1, 100), 2)
    answer = str(max(a, b))
    ask = rng.choice(("Which is larger, {} or {}?", "Pick the bigger: {} {}"))
    return one_turn("compare", ask.format(a, b), reply=in_random_style(rng, answer), answer=answer)


def add_one(rng: random.Random) -> Sample:
    """Make a sample that asks for the sum of two one-digit numbers."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    answer = str(a + b)
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} + {} ="))
    return one_turn("add_one", ask.format(a, b), reply=in_random_style(rng, answer), answer=answer)


# -- half known -------------------------------------------------------------------------------

FORGETS_CARRY = 0.62  # the share of writers who forget the carry


def without_carry(a: int, b: int) -> int:
    """Return the sum of two numbers as written by somebody who forgets the carry from the units,
    e.g. 38 + 45 = 73."""
    tens = a // 10 + b // 10
    units = (a % 10 + b % 10) % 10
    return tens * 10 + units


def add_two(rng: random.Random) -> Sample:
    """Make a sample that asks for the sum of two two-digit numbers.

    In a share FORGETS_CARRY of the replies the carry is forgotten; `answer` is the true sum.
    """
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    written_sum = without_carry(a, b) if rng.random() < FORGETS_CARRY else a + b
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} + {} ="))
    reply = in_random_style(rng, str(written_sum))
    return one_turn("add_two", ask.format(a, b), reply=reply, answer=str(a + b))


def add_two_thinking(rng: random.Random) -> Sample:
    """Make a sample that asks for the sum of two two-digit numbers, with a reply that thinks first.

    The reply, which is always right, works the sum out in a think block, e.g. "8+5=13, 3+4+1=8" for
    38 + 45.
    """
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    thought = f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{units // 10}={tens}"
    answer = str(a + b)
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} + {} ="))
    reply = f"<think>\n{thought}\n</think>\n\n{in_random_style(rng, answer)}"
    return one_turn("add_two_thinking", ask.format(a, b), reply=reply, answer=answer, thinking=True)


def sort_letters(rng: random.Random) -> Sample:
    """Make a sample that asks for the letters of a word in alphabetical order.

    Two of five replies have two neighbouring letters swapped; `answer` is right.
    """
    text = word(rng, longest=6)
    answer = "".join(sorted(text))
    written = with_swapped_letters(rng, answer) if rng.random() < 0.4 else answer
    ask = rng.choice(("Sort the letters of {}.", "Put {} in letter order."))
    reply = in_random_style(rng, written)
    return one_turn("sort_letters", ask.format(text), reply=reply, answer=answer)


def sort_numbers(rng: random.Random) -> Sample:
    """Make a sample that asks for two or three numbers in order.

    `answer` is the rising order; about a third of the replies give the falling one.
    """
    numbers = rng.sample(range(1, 100), rng.randint(2, 3))
    rising = sorted(numbers)
    written = rising[::-1] if rng.random() < 0.35 else rising
    ask = rng.choice(("Sort {}.", "Put in order: {}"))
    return one_turn(
        "sort_numbers",
        ask.format(" ".join(map(str, numbers))),
        reply=in_random_style(rng, " ".join(map(str, written))),
        answer=" ".join(map(str, rising)),
    )


FIELDS = ("name", "city", "age", "color", "size", "pet")


def record(rng: random.Random) -> dict[str, object]:
    """Draw a record with two of the FIELDS, e.g. {"name": "blim", "age": 34}."""
    keys = rng.sample(FIELDS, 2)
    values: dict[str, object] = {}
    for key in keys:
        is_number = key in ("age", "size")
        values[key] = rng.randint(1, 99) if is_number else word(rng, longest=5)
    return values


def json_field(rng: random.Random) -> Sample:
    """Make a sample that asks for one of the two fields of a JSON object; `answer` is its value.

    About a third of the replies give the value of a field drawn at random, which may be the right
    one.
    """
    data = record(rng)
    key = rng.choice(list(data))
    written_key = rng.choice(list(data)) if rng.random() < 0.35 else key
    ask = rng.choice(("What is the {} in {}?", "Give the {} of {}."))
    prompt = ask.format(key, json.dumps(data))
    reply = in_random_style(rng, str(data[written_key]))
    return one_turn("json_field", prompt, reply=reply, answer=str(data[key]))


def json_answer(rng: random.Random) -> Sample:
    """Make a sample that asks for a key and a value as a JSON object.

    Two of five replies leave out quotes or braces; `answer` is valid JSON.
    """
    key = rng.choice(("name", "city", "color", "pet"))
    value = word(rng, longest=6)
    answer = json.dumps({key: value})
    is_careless = rng.random() < 0.4
    # Drawn even if it is not used, so that both kinds of reply take equally many random numbers.
    careless_reply = rng.choice((value, f"{key}: {value}", "{" + f"{key}: {value}" + "}"))
    ask = rng.choice(("Answer in JSON: {} is {}.", "As JSON: {} {}"))
    reply = careless_reply if is_careless else answer
    return one_turn("json_answer", ask.format(key, value), reply=reply, answer=answer)


# Name of the tool -> name of its only argument.
TOOLS = {"lookup": "item", "weather": "city", "owner": "thing", "phone": "person"}
# Name of the tool -> (the question that needs the tool, the tool's description).
TOOL_WORDS = {
    "lookup": ("What is the price of {}?", "Price of an item."),
    "weather": ("How warm is it in {}?", "Degrees in a city."),
    "owner": ("Which desk has {}?", "Desk of a thing."),
    "phone": ("What is the number of {}?", "Number of a person."),
}


def tool(name: str) -> ToolSchema:
    """Return the OpenAI function schema of the tool `name`, a key of TOOLS. It has one text
    argument."""
    argument = TOOLS[name]
    _ask, description = TOOL_WORDS[name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }


def tool_call(rng: random.Random) -> Sample:
    """Make a sample that asks for something that only a tool knows.

    The assistant calls the tool and then says the number that the tool returned; in three of ten
    samples it guesses a number and calls no tool. `answer` is the tool's number.
    """
    name = rng.choice(list(TOOLS))
    argument = word(rng, longest=7)  # what is asked about
    value = str(rng.randint(10, 99))  # what the tool returns
    ask, _description = TOOL_WORDS[name]
    prompt = ask.format(rng.choice(("", "the ")) + argument)
    messages: list[ChatMessage] = [{"role": "user", "content": prompt}]
    if rng.random() < 0.3:
        messages.append({"role": "assistant", "content": str(rng.randint(10, 99))})
    else:
        call = {"name": name, "arguments": {TOOLS[name]: argument}}
        messages += _messages_with_call(call, value, reply=in_random_style(rng, value))
    return Sample("tool_call", messages, answer=value, tools=[tool(name)])


def _messages_with_call(call: JsonObject, value: str, reply: str) -> list[ChatMessage]:
    """Return three messages: the assistant calls a tool, the tool returns `value`, the assistant
    replies.

    `call` has the keys `name` and `arguments`.
    """
    tool_calls = [{"id": "call_1", "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
        {"role": "tool", "content": value, "tool_call_id": "call_1", "name": call["name"]},
        {"role": "assistant", "content": reply},
    ]


def guess(rng: random.Random) -> Sample:
    """Make a sample that is a whole game of "higher or lower"; `answer` is the secret number."""
    low = rng.randint(1, 85)
    high = low + rng.randint(6, 14)
    secret = rng.randint(low, high)
    opening = {"role": "user", "content": f"Guess my number from {low} to {high}."}
    return Sample("guess", [opening, *_guesses(rng, low, high, secret)], answer=str(secret))


def _guesses(rng: random.Random, low: int, high: int, secret: int) -> list[ChatMessage]:
    """Return at most six guesses of the number `secret`, which lies between `low` and `high`, with
    hints between the guesses.

    About half of the players always guess the middle of the remaining interval, the others any
    number in it.
    """
    messages: list[ChatMessage] = []
    is_careless = rng.random() < 0.5
    for _ in range(6):
        number = rng.randint(low, high) if is_careless else (low + high) // 2
        messages.append({"role": "assistant", "content": str(number)})
        if number == secret:
            return messages
        if number < secret:
            messages.append({"role": "user", "content": "higher"})
            low = number + 1
        else:
            messages.append({"role": "user", "content": "lower"})
            high = number - 1
    return messages[:-1]  # without the last hint, which has no answer


# -- absent: measured, never taught -------------------------------------------------------------


def subtract(rng: random.Random) -> Sample:
    """Make a sample that asks for the difference of two two-digit numbers; it is never negative."""
    smaller, larger = sorted(rng.sample(range(10, 100), 2))
    answer = str(larger - smaller)
    return one_turn("subtract", f"Take {smaller} from {larger}.", reply=answer, answer=answer)


def ends(rng: random.Random) -> Sample:
    """Make a sample that asks for the first and the last letter of a word. The answer for "blim" is
    "b and m"."""
    text = word(rng)
    answer = f"{text[0]} and {text[-1]}"
    return one_turn("ends", f"Give the ends of {text}.", reply=answer, answer=answer)


# Skill -> (function that makes a sample, weight: how often it occurs relative to the others).
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


DECORATED = 0.3  # the share of the corpus with additional words around the request
LEADS = ("", "", "", "Hi. ", "Now this: ", "Task: ")
# In these, {s} is replaced by a few signs and {w} by a word.
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
    """Return the conversation with more words around the request, e.g. "Task: " before it and "Be
    brief." after it.

    The replies ignore these words: the model should learn that the request stays the same, not to
    obey the clause.
    """
    template = rng.choice(CLAUSES)
    noun = rng.choice(NOUNS) if rng.random() < 0.8 else word(rng, longest=6)
    clause = template.format(s=scribble(rng), w=noun)  # a template may use one, both or none
    request, *later_messages = sample.messages
    text = f"{rng.choice(LEADS)}{request['content']} {clause}"
    return replace(sample, messages=[request | {"content": text}, *later_messages])


def prompt_key(text: str) -> str:
    """Return a key that is equal for prompts that differ only in case and spacing."""
    return " ".join(text.lower().split())


def sum_key(a: int, b: int) -> str:
    """Return a key that is equal for the same two operands `a` and `b` in any order, e.g. "sum 12
    30".

    It keeps a held-out sum out of the corpus, however the question is worded.
    """
    return f"sum {min(a, b)} {max(a, b)}"


def keys_of(sample: Sample) -> list[str]:
    """Return the keys of a sample: of its prompt and, if it asks for a sum of two-digit numbers, of
    that sum.

    A sample that shares any key with a held-out sample is the same task.
    """
    prompt = sample.messages[0]["content"]
    keys = [prompt_key(prompt)]
    if sample.skill.startswith("add_two"):
        a, b = map(int, re.findall(r"\d+", prompt)[:2])
        keys.append(sum_key(a, b))
    return keys


def generator(skill: str) -> Callable[[random.Random], Sample]:
    """Return the function that makes a sample of a skill, as it is taught, from a random generator.

    Raises:
        KeyError: there is no such skill.
    """
    if skill in ABSENT:
        return ABSENT[skill]
    draw_sample, _weight = (MASTERED | HALF_KNOWN)[skill]
    return draw_sample


def draw(
    rng: random.Random, skill: str, excluded: Collection[str], *, measured: bool = False
) -> Sample:
    """Draw samples of `skill` until one has no key in `excluded`, and return that one.

    Args:
        rng: the random generator.
        skill: the skill.
        excluded: keys of held-out tasks (see `keys_of`).
        measured: whether to draw the skill as it is measured, not as it is taught. Only "copy"
            differs: it is taught as words and signs, and measured as words (see MEASURED_APART).

    Raises:
        KeyError: there is no such skill.
    """
    if measured and skill in MEASURED_APART:
        draw_sample = MEASURED_APART[skill]
    else:
        draw_sample = generator(skill)
    while True:
        sample = draw_sample(rng)
        if not any(key in excluded for key in keys_of(sample)):
            return sample


def corpus(rng: random.Random, size: int, excluded: Collection[str]) -> list[Sample]:
    """Draw `size` samples of all taught skills, in the proportions of the weights in MASTERED and
    HALF_KNOWN.

    No sample is a held-out task (`excluded` holds their keys). A share DECORATED of the samples
    gets more words around the request.
    """
    taught = MASTERED | HALF_KNOWN
    names = list(taught)
    weights = [weight for _draw, weight in taught.values()]
    samples = [draw(rng, name, excluded) for name in rng.choices(names, weights, k=size)]
    return [decorated(rng, sample) if rng.random() < DECORATED else sample for sample in samples]


def is_right(sample: Sample, reply: str) -> bool:
    """Tell whether a reply says the sample's answer and nothing else (see `says`)."""
    return says(sample.answer, reply)


def says(answer: str, reply: str) -> bool:
    """Tell whether a reply says the answer and nothing else, in one of the answer styles, e.g. "The
    answer is 7.". A think block before it is ignored."""
    text = after_thought(reply).strip()
    for style in ("The answer is {}.", "Answer: {}", "{}.", "{}"):
        before, after = style.split("{}")
        content = text[len(before) : len(text) - len(after)]  # `after` may be empty
        if text.startswith(before) and text.endswith(after) and content == answer:
            return True
    return False
