"""The probes: answers that a scorer should not pay, made from a task and its reference (gold).

Each probe tries one way in which a careless scorer pays for something that is no answer. The probes
in INFORMATIVE do not count against a scorer; they are shown for information.
"""

import json
import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.json_types import ChatMessage

GOLD = "gold"
PROBES: dict[str, str] = {
    GOLD: "the reference answer; it should earn the most",
    "empty": "nothing at all",
    "short junk": "two random letters",
    "junk": "random letters",
    "long junk": "random words up to any token limit",
    "prompt echo": "the question repeated",
    "opener only": "a polite beginning without an answer",
    "enumerated": "many answers at once, the right one among them",
    "filler": "many words that say nothing",
    "format only": "the form of the answer without its content",
    "negated gold": "the right answer denied",
    "gold then wrong": "the right answer, then a wrong one",
    "wrong then gold": "a wrong answer, then the right one",
    "gold then junk": "the right answer, then random words up to any token limit",
    "truncated gold": "the beginning of the right answer",
    "off by one": "the right answer with one thing changed",
    "other gold": "the right answer of another row",
    "last message only": "the last reference message without those before it",
    "exception trigger": "an answer made to break a scorer: odd numbers, signs, brackets, calls",
}
OVERLONG = "gold then junk"
LENGTHS = ("short junk", "junk", "long junk")  # meaningless answers of increasing length
# These may be paid: a model that corrects itself, skips steps or does not stop still has the right
# answer. The exception trigger only tests whether scoring raises, whatever it pays.
INFORMATIVE = frozenset(
    {GOLD, "wrong then gold", OVERLONG, "last message only", "exception trigger"}
)
# Nearly right answers: how far they earn below gold shows how well the scorer separates.
NEAR = frozenset({"truncated gold", "off by one", "other gold"})
# In a multi-turn environment: probes of one message, and probes that change the last message of
# the reference answer.
PLAYED_ALONE = ("empty", *LENGTHS, "prompt echo", "opener only", "filler", "enumerated")
PLAYED_LAST = (
    "off by one",
    "negated gold",
    "gold then wrong",
    "wrong then gold",
    "format only",
    OVERLONG,
)

TRIGGERS = (
    "9" * 5000,
    "1e999",
    "nan",
    "-inf",
    "1/0",
    "\u0660\u0661\u00b2\u2460",  # all digits for str.isdigit, but not all of them for int
    "{" * 2000,
    '{"answer": null}',
    "[1, 2",
    "<answer></answer>",
    "\\boxed{",
    "####",
    "()[]{}*+?\\",
    "\x00\ufffd\u202e",
    "\n\n\n",
    "None",
)

OPENER = "Sure! Here is the answer to your question:"
FILLER = (
    "Let me think about this step by step. There are several things to consider here, and each of "
    "them matters in its own way. First we look at what is asked, then we look at what is given. "
    "It is important to be careful and to check every step. Taking everything into account, we can "
    "say that the answer follows from the question, as one would expect. In conclusion, this is "
    "what we have found, and it is hoped that it helps. "
)
LONG_JUNK_WORDS = 300  # words of junk: about 2,000 characters, more than most token limits allow
LONG_WORDS = 6  # a core of more words is prose: changing one letter does not make it wrong
MANY = 12  # values in an answer that lists many
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# An answer in a final tag or behind a final marker: head, core (what must be right), tail.
TAGGED = re.compile(r"(?P<head>.*<(?P<tag>\w+)>)(?P<core>.*?)(?P<tail></(?P=tag)>\s*)", re.DOTALL)
MARKED = re.compile(
    r"(?P<head>.*(?:####|\\boxed\{|[Aa]nswer(?: is)?\s*[:=]|[Aa]nswer is)\s*)"
    r"(?P<core>\S.*?)(?P<tail>[}.]*\s*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Core:
    """A reference answer in three parts: `head` + `text` + `tail`, where `text` has to be right.

    `is_json` is True if the whole answer is a JSON object or list; head and tail are then "".
    """

    head: str
    text: str
    tail: str
    is_json: bool = False

    @property
    def is_prose(self) -> bool:
        """Whether the text is a sentence rather than a value."""
        return not self.is_json and len(self.text.split()) > LONG_WORDS

    def with_text(self, text: str) -> str:
        """Return the reference answer with `text` in the place of the right one."""
        return self.head + text + self.tail


def take_apart(gold: str) -> Core:
    """Split a reference answer into the part that has to be right and the text around it.

    The part that has to be right is the first of these that exists:

    1. the whole answer, if it is a JSON object or list
    2. the content of a final tag or the text behind a final marker, such as `<answer>...</answer>`,
       `####` or `Answer:`
    3. the last number of the last line, if that line is short
    4. the last line
    """
    if _is_json_container(gold):
        return Core(head="", text=gold, tail="", is_json=True)
    for pattern in (TAGGED, MARKED):
        match = pattern.fullmatch(gold)
        if match and match["core"].strip():
            return Core(match["head"], match["core"], match["tail"])
    return _core_in_last_line(gold)


def _is_json_container(text: str) -> bool:
    """Whether a text is a JSON object or list."""
    if text.strip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _core_in_last_line(gold: str) -> Core:
    """Split a reference answer into what has to be right and the text before and after it.

    If the last line contains a number and at most LONG_WORDS (6) words, its last number has to be
    right, else the whole line.
    """
    stripped = gold.rstrip()
    line_start = stripped.rfind("\n") + 1  # where the last line begins
    numbers = list(NUMBER.finditer(stripped, line_start))
    if numbers and len(stripped[line_start:].split()) <= LONG_WORDS:
        last_number = numbers[-1]
        head, tail = gold[: last_number.start()], gold[last_number.end() :]
        return Core(head, last_number.group(), tail)
    return Core(gold[:line_start], stripped[line_start:], gold[len(stripped) :])


def text_probes(
    prompt: str, gold: str | None, other_golds: Sequence[str], rng: random.Random
) -> dict[str, str]:
    """Make the probes of a single-turn task (answers to try on its scorer), as name -> completion.

    The reference answer itself comes first, under the name GOLD. A probe that would equal it, or
    that makes no sense for it, is left out.

    Args:
        prompt: the text of the task's prompt.
        gold: its reference answer. If None, only probes that need no reference answer are made.
        other_golds: reference answers of other rows.
        rng: the source of random choices.
    """
    probes = _probes_without_gold(prompt, rng)
    if gold is None:
        return probes
    core = take_apart(gold)  # what has to be right, and the text around it
    plain_gold = _plain(gold)
    # Another row may have the same reference answer, which is then not wrong here.
    wrong_golds = [other_gold for other_gold in other_golds if _plain(other_gold) != plain_gold]
    probes[OVERLONG] = f"{gold}\n{probes['long junk']}"
    if core.is_json:
        probes |= _json_probes(core, wrong_golds)
    else:
        probes |= _core_probes(core, wrong_golds, rng)
    if wrong_golds:
        probes["other gold"] = rng.choice(wrong_golds)
    unlike_gold = {name: text for name, text in probes.items() if _plain(text) != plain_gold}
    return {GOLD: gold, **unlike_gold}


def _probes_without_gold(prompt: str, rng: random.Random) -> dict[str, str]:
    """Make the probes (answers that a scorer should not pay) that need no reference answer, as name
    -> completion.

    `prompt` is the text of the task's prompt.
    """
    junk = "".join(rng.choices(string.ascii_lowercase + " ", k=28)).strip()
    junk = junk or "qx"  # if only spaces were drawn
    long_junk = _random_words(junk)
    return {
        "empty": "",
        "short junk": long_junk[:2],  # two letters, because a word has at least three
        "junk": junk,
        "long junk": long_junk,
        "prompt echo": prompt,
        "opener only": OPENER,
        "filler": FILLER * 2,
        "exception trigger": rng.choice(TRIGGERS),
    }


def _random_words(seed: str) -> str:
    """Return LONG_JUNK_WORDS (300) words of 3 to 9 random letters, always the same for the same
    `seed`."""
    # A generator of its own: drawing from that of the audit would change the other probes.
    rng = random.Random(seed)
    words = []
    for _ in range(LONG_JUNK_WORDS):
        letter_count = rng.randint(3, 9)
        words.append("".join(rng.choices(string.ascii_lowercase, k=letter_count)))
    return " ".join(words)


def _core_probes(core: Core, other_golds: Sequence[str], rng: random.Random) -> dict[str, str]:
    """Make the probes (wrong answers to try on a scorer) from a reference answer that is text, as
    name -> completion.

    `core` is the reference answer, with the part that has to be right; `other_golds` are reference
    answers of other rows.
    """
    wrong = _wrong_answer(core, other_golds, rng)  # "" for prose if there are no other golds
    probes = {
        "enumerated": _enumerated(core, other_golds, rng),
        "format only": _contentless(core),
    }
    if wrong:
        gold = core.with_text(core.text)
        probes["gold then wrong"] = f"{gold}\n{wrong}"
        probes["wrong then gold"] = f"{wrong}\n{gold}"
    # Half of a value is wrong, but half of a sentence may still say enough: keep a quarter of it.
    kept_length = len(core.text) // 4 if core.is_prose else len(core.text) // 2
    truncated = core.text[:kept_length]
    if truncated:
        probes["truncated gold"] = core.head + truncated
    if not core.is_prose:  # then `wrong` is the value, changed a little
        probes["negated gold"] = core.with_text("not " + core.text)
        probes["off by one"] = wrong
    return probes


def _wrong_answer(core: Core, other_golds: Sequence[str], rng: random.Random) -> str:
    """Return a wrong answer; "" if none can be made.

    It is the right value with one small change, or for prose one of `other_golds` (reference
    answers of other rows). Prose is not changed, because a sentence with one changed letter may
    still be right.
    """
    if not core.is_prose:
        return core.with_text(with_small_change(core.text, rng))
    return rng.choice(other_golds) if other_golds else ""


def _contentless(core: Core) -> str:
    """Return the form of a reference answer without its content.

    If text stands around the part that has to be right, it stays, around a "?"; otherwise an x
    replaces each letter and digit.
    """
    has_frame = bool(core.head + core.tail)
    if has_frame:
        return core.with_text("?")
    return core.with_text(re.sub(r"\w", "x", core.text))


def _json_probes(core: Core, other_golds: Sequence[str]) -> dict[str, str]:
    """Make the probes (wrong answers to try on a scorer) from a reference answer that is a JSON
    object or list, as name -> completion.

    `other_golds` are reference answers of other rows. A probe that equals the right value, because
    there is nothing to change or to empty, is left out.
    """
    value = json.loads(core.text)
    wrong = json.dumps(_with_changed_leaf(value))
    probes = {
        "format only": json.dumps(_emptied(value)),
        "gold then wrong": f"{core.text}\n{wrong}",
        "wrong then gold": f"{wrong}\n{core.text}",
        "truncated gold": core.text[: len(core.text) // 2],
        "off by one": wrong,
        "enumerated": json.dumps(_json_values(value, other_golds)),
    }
    right_text = json.dumps(value)
    return {name: text for name, text in probes.items() if text != right_text}


def _json_values(right_value: Any, other_golds: Sequence[str]) -> list[Any]:
    """Return a list of JSON values: the right one in the middle, wrong ones around it.

    The right one is in the middle so that a scorer that reads only the first or the last value
    misses it. The wrong ones are up to MANY of `other_golds` (reference answers of other rows) that
    are JSON.
    """
    values = [right_value]
    for other_gold in other_golds[:MANY]:
        try:
            values.append(json.loads(other_gold))
        except ValueError:  # another row's answer need not be JSON
            continue
    middle = len(values) // 2
    values[0], values[middle] = values[middle], values[0]
    return values


def _enumerated(core: Core, other_golds: Sequence[str], rng: random.Random) -> str:
    """Make one answer that lists several values separated by commas, the right one in the middle.

    The wrong values come from `other_golds`, reference answers of other rows. If these give fewer
    than three, more are made by changing the last wrong value (or the right one, if there is none).
    """
    # Take more than MANY, because equal values are dropped; not all of them, to stay fast.
    other_texts = [take_apart(other_gold).text for other_gold in other_golds[: 4 * MANY]]
    distinct_texts = list(dict.fromkeys(other_texts))
    wrong_texts = [text for text in distinct_texts if _plain(text) != _plain(core.text)]
    values = wrong_texts[:MANY]
    while len(values) < 3:
        last_value = values[-1] if values else core.text
        values.append(with_small_change(last_value, rng))
    values.insert(len(values) // 2, core.text)
    return core.with_text(", ".join(values))


def with_small_change(text: str, rng: random.Random) -> str:
    """Return `text` with one small change that makes it wrong.

    A number becomes 1 larger or smaller; in any other text one letter or digit changes.
    """
    if NUMBER.fullmatch(text):
        digits = text.replace(",", "")  # without the commas between thousands
        step = rng.choice((-1, 1))
        return str(float(digits) + step) if "." in digits else str(int(digits) + step)
    return _with_changed_letter(text)


def _with_changed_letter(text: str) -> str:
    """Return `text` with its last ASCII letter or digit replaced by the next one.

    z, Z and 9 are replaced by the one before. If the text has no letter or digit, " x" is appended.
    """
    positions = [
        position
        for position, character in enumerate(text)
        if character.isascii() and character.isalnum()
    ]
    if not positions:
        return text + " x"
    last = positions[-1]
    step = -1 if text[last] in "zZ9" else 1  # after these comes no letter or digit
    neighbour = chr(ord(text[last]) + step)
    return text[:last] + neighbour + text[last + 1 :]


def _with_changed_leaf(value: Any) -> Any:
    """Return a copy of a JSON value in which the first leaf (a value that is no object or list) is
    wrong. An empty object or list that comes first gets a new member instead."""
    if isinstance(value, dict):
        if not value:
            return {"x": 0}
        first_key = next(iter(value))
        return {**value, first_key: _with_changed_leaf(value[first_key])}
    if isinstance(value, list):
        if not value:
            return [0]
        return [_with_changed_leaf(value[0]), *value[1:]]
    if isinstance(value, bool):  # before int, because a bool is an int in Python
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        # A generator of its own: drawing from that of the audit would change the other probes.
        return with_small_change(value, random.Random(0)) if value else "x"
    return 0  # the leaf is null


def _emptied(value: Any) -> Any:
    """Return a JSON value of the same form, but empty: {"a": "yes"} becomes {"a": ""}.

    Objects keep their keys; lists become [], strings "", bools False, numbers 0; null stays null.
    """
    if isinstance(value, dict):
        return {key: _emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return []
    if isinstance(value, str):
        return ""
    if value is None:
        return None
    return False if isinstance(value, bool) else 0  # bool first: it is an int in Python


def _plain(text: str) -> str:
    """Return `text` in lower case and with single spaces, to compare texts by their words."""
    return " ".join(text.split()).casefold()


def message_probes(
    prompt: str,
    gold: Sequence[ChatMessage],
    other_golds: Sequence[Sequence[ChatMessage]],
    rng: random.Random,
) -> dict[str, list[ChatMessage]]:
    """Make the probes of a multi-turn task: name -> assistant messages to be played in order.

    Most come from the probes that `text_probes` makes for the last message of `gold`: those named
    in `PLAYED_ALONE` are played as a single message, those in `PLAYED_LAST` after the earlier
    messages of `gold`.

    Args:
        prompt: the text of the task's prompt.
        gold: the assistant messages of its reference answer; empty if it has none.
        other_golds: the assistant messages of other rows' reference answers.
        rng: the source of random choices.
    """
    last_text = _text_of_last(gold)
    other_texts = [_text_of_last(other_gold) for other_gold in other_golds if other_gold]
    # If `gold` does not end with a text, None makes only the probes that need no reference answer.
    last_message_probes = text_probes(prompt, last_text or None, other_texts, rng)
    single_message_probes = _single_message_probes(last_message_probes, rng)
    if not gold:
        return single_message_probes
    return _gold_probes(gold, other_golds, last_message_probes, rng) | single_message_probes


def _single_message_probes(
    last_message_probes: Mapping[str, str], rng: random.Random
) -> dict[str, list[ChatMessage]]:
    """Make the probes of a multi-turn task that are played as a single message: name -> messages.

    `last_message_probes` are the text probes for the last message of the reference answer, as name
    -> text.
    """
    probes = {
        name: [_assistant(last_message_probes[name])]
        for name in PLAYED_ALONE
        if name in last_message_probes
    }
    odd_text = last_message_probes.get("exception trigger")  # None: it equals the reference answer
    # About half of the rows try a broken tool call instead of an odd text.
    if rng.random() < 0.5 or odd_text is None:
        trigger = _assistant("") | {"tool_calls": [_bad_call(rng)]}
    else:
        trigger = _assistant(odd_text)
    probes["exception trigger"] = [trigger]
    return probes


def _gold_probes(
    gold: Sequence[ChatMessage],
    other_golds: Sequence[Sequence[ChatMessage]],
    last_message_probes: Mapping[str, str],
    rng: random.Random,
) -> dict[str, list[ChatMessage]]:
    """Make the probes of a multi-turn task from reference answers, as name -> messages.

    Args:
        gold: the assistant messages of the task's reference answer, at least one.
        other_golds: the assistant messages of other rows' reference answers.
        last_message_probes: the probes for the last message of `gold`, as name -> text.
        rng: the source of random choices.
    """
    probes: dict[str, list[ChatMessage]] = {GOLD: list(gold)}
    probes |= _changed_last_message(gold, last_message_probes)
    if len(gold) > 1:
        probes["truncated gold"] = list(gold[:-1])
        probes["last message only"] = [gold[-1]]
    different = [other_gold for other_gold in other_golds if list(other_gold) != list(gold)]
    if different:
        probes["other gold"] = list(rng.choice(different))
    return probes


def _changed_last_message(
    gold: Sequence[ChatMessage], last_message_probes: Mapping[str, str]
) -> dict[str, list[ChatMessage]]:
    """Make the probes that change only the last message of a reference answer: name -> messages.

    Only the probes named in `PLAYED_LAST` are made.

    Args:
        gold: the assistant messages of the reference answer.
        last_message_probes: name of a probe -> the text of its last message.
    """
    earlier = gold[:-1]
    return {
        name: [*earlier, _assistant(last_message_probes[name])]
        for name in PLAYED_LAST
        if name in last_message_probes
    }


def _text_of_last(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last message; "" if it has none or there are no messages."""
    return str(messages[-1].get("content") or "") if messages else ""


def _assistant(text: str) -> ChatMessage:
    """Return an assistant message with this text."""
    return {"role": "assistant", "content": text}


def _bad_call(rng: random.Random) -> ChatMessage:
    """Return a faulty tool call as a model might make it: an unknown or empty name, or arguments
    that are no JSON object."""
    faulty_calls = (("nothing", "{}"), ("", "{}"), ("lookup", "[1, 2]"), ("x", "{"))
    name, arguments = rng.choice(faulty_calls)
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
