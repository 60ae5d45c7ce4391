"""Answers that should not be paid, made from a task and its reference answer.

Each tries one way in which a careless scorer pays for something that is no answer. Which of them
count against a scorer stands in `PROBES`; the others are shown for information.
"""

import json
import random
import re
import string
from collections.abc import Sequence
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
LENGTHS = ("short junk", "junk", "long junk")  # the same nothing, longer and longer
# A model that corrects itself, gets there at once or does not stop may well be paid, unless it is
# paid more for it; a trigger is there to see whether a score raises, whatever it pays.
INFORMATIVE = frozenset(
    {GOLD, "wrong then gold", OVERLONG, "last message only", "exception trigger"}
)
# Nearly right: how far below gold they earn says how well the scorer separates.
NEAR = frozenset({"truncated gold", "off by one", "other gold"})

TRIGGERS = (
    "9" * 5000,
    "1e999",
    "nan",
    "-inf",
    "1/0",
    "\u0660\u0661\u00b2\u2460",  # digits to str.isdigit, not all of them to int
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
ENDLESS = 300  # words of junk: about 2,000 characters, more than most limits on tokens allow
LONG_WORDS = 6  # a longer core is prose: one letter more or less does not make it wrong
MANY = 12  # values in an answer that lists many
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
TAGGED = re.compile(r"(?P<head>.*<(?P<tag>\w+)>)(?P<core>.*?)(?P<tail></(?P=tag)>\s*)", re.DOTALL)
MARKED = re.compile(
    r"(?P<head>.*(?:####|\\boxed\{|[Aa]nswer(?: is)?\s*[:=]|[Aa]nswer is)\s*)"
    r"(?P<core>\S.*?)(?P<tail>[}.]*\s*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Core:
    """A reference answer taken apart: `head` + `text` + `tail`; `text` is what has to be right."""

    head: str
    text: str
    tail: str
    is_json: bool = False

    @property
    def is_prose(self) -> bool:
        """Whether the text is a sentence rather than a value."""
        return not self.is_json and len(self.text.split()) > LONG_WORDS

    def with_text(self, text: str) -> str:
        """The reference answer with another text in the place of the right one."""
        return self.head + text + self.tail


def take_apart(gold: str) -> Core:
    """Split a reference answer into the part that has to be right and what stands around it.

    The part that has to be right is the first of these that exists:

    1. the whole answer, if it is a JSON object or list
    2. what a final tag or marker holds, such as `<answer>...</answer>`, `####` or `Answer:`
    3. the last number of the last line, if that line is short
    4. the last line
    """
    if gold.strip()[:1] in ("{", "["):
        try:
            json.loads(gold)
        except ValueError:
            pass
        else:
            return Core("", gold, "", is_json=True)
    for pattern in (TAGGED, MARKED):
        match = pattern.fullmatch(gold)
        if match and match["core"].strip():
            return Core(match["head"], match["core"], match["tail"])
    stripped = gold.rstrip()
    start = stripped.rfind("\n") + 1
    numbers = list(NUMBER.finditer(stripped, start))
    if numbers and len(stripped[start:].split()) <= LONG_WORDS:
        last = numbers[-1]
        return Core(gold[: last.start()], last.group(), gold[last.end() :])
    return Core(gold[:start], stripped[start:], gold[len(stripped) :])


def text_probes(
    prompt: str, gold: str | None, others: Sequence[str], rng: random.Random
) -> dict[str, str]:
    """The probes of a single-turn task, as name -> completion.

    The reference answer itself comes first, under the name GOLD. A probe that would equal it, or
    that makes no sense for it, is left out.

    Args:
        prompt: the text of the task's prompt.
        gold: its reference answer. None if it has none; then only probes that need none are made.
        others: reference answers of other rows.
        rng: where random choices come from.
    """
    junk = "".join(rng.choices(string.ascii_lowercase + " ", k=28)).strip() or "qx"
    endless = _endless(junk)
    probes = {
        "empty": "",
        "short junk": endless[:2],
        "junk": junk,
        "long junk": endless,
        "prompt echo": prompt,
        "opener only": OPENER,
        "filler": FILLER * 2,
        "exception trigger": rng.choice(TRIGGERS),
    }
    if gold is None:
        return probes
    core = take_apart(gold)
    different = [other for other in others if _plain(other) != _plain(gold)]
    probes[OVERLONG] = f"{gold}\n{endless}"
    probes |= _json_probes(core, different) if core.is_json else _core_probes(core, different, rng)
    if different:
        probes["other gold"] = rng.choice(different)
    remaining = {name: text for name, text in probes.items() if _plain(text) != _plain(gold)}
    return {GOLD: gold, **remaining}


def _endless(seed: str) -> str:
    """ENDLESS words of random letters, always the same for the same `seed`."""
    # A generator of its own: drawing from that of the audit would change the other probes.
    rng = random.Random(seed)
    return " ".join(
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(ENDLESS)
    )


def _core_probes(core: Core, others: Sequence[str], rng: random.Random) -> dict[str, str]:
    """The probes made from a reference answer that is text, as name -> completion.

    A wrong answer is the reference answer with one small change. For prose it is one of `others`
    (reference answers of other rows), because a sentence with one changed letter may still be
    right. Prose without `others` gets no probes with a wrong answer.
    """
    gold = core.with_text(core.text)
    if core.is_prose:
        wrong = rng.choice(others) if others else ""
        truncated = core.text[: len(core.text) // 4]  # half a sentence may say enough
    else:
        wrong = core.with_text(changed(core.text, rng))
        truncated = core.text[: len(core.text) // 2]
    # Without head and tail the form of the answer is the pattern of its own letters.
    blank = "?" if core.head + core.tail else re.sub(r"\w", "x", core.text)
    probes = {"enumerated": _enumerated(core, others, rng), "format only": core.with_text(blank)}
    if wrong:
        probes["gold then wrong"] = f"{gold}\n{wrong}"
        probes["wrong then gold"] = f"{wrong}\n{gold}"
    if truncated:
        probes["truncated gold"] = core.head + truncated
    if not core.is_prose:
        probes["negated gold"] = core.with_text("not " + core.text)
        probes["off by one"] = wrong
    return probes


def _json_probes(core: Core, others: Sequence[str]) -> dict[str, str]:
    """The probes made from a reference answer that is a JSON object or list, as name -> completion.

    `others` are reference answers of other rows. Probes that equal the right value are left out.
    """
    value = json.loads(core.text)
    wrong = json.dumps(_changed_leaf(value)[0])
    parsed = [value]
    for other in others[:MANY]:
        try:
            parsed.append(json.loads(other))
        except ValueError:  # another row's answer need not be JSON
            continue
    # The right value goes to the middle, where a scorer that reads the first or last misses it.
    parsed[0], parsed[len(parsed) // 2] = parsed[len(parsed) // 2], parsed[0]
    probes = {
        "format only": json.dumps(_emptied(value)),
        "gold then wrong": f"{core.text}\n{wrong}",
        "wrong then gold": f"{wrong}\n{core.text}",
        "truncated gold": core.text[: len(core.text) // 2],
        "off by one": wrong,
        "enumerated": json.dumps(parsed),
    }
    same = json.dumps(value)
    return {name: text for name, text in probes.items() if text != same}


def _enumerated(core: Core, others: Sequence[str], rng: random.Random) -> str:
    """One answer that lists several values separated by commas, the right one in the middle.

    The wrong values come from `others`, reference answers of other rows. If there are fewer than
    three, more are made by changing the last of them, or the right value.
    """
    # More than MANY are looked at, because equal ones are dropped; not all, to stay fast.
    cores = list(dict.fromkeys(take_apart(other).text for other in others[: 4 * MANY]))
    cores = [text for text in cores if _plain(text) != _plain(core.text)][:MANY]
    while len(cores) < 3:
        cores.append(changed(cores[-1] if cores else core.text, rng))
    cores.insert(len(cores) // 2, core.text)
    return core.with_text(", ".join(cores))


def changed(text: str, rng: random.Random) -> str:
    """`text` with one small change that makes it wrong.

    A number becomes one larger or smaller. In any other text the last letter or digit is replaced
    by the next in the alphabet; a text without letters and digits gets an " x" at its end.
    """
    if NUMBER.fullmatch(text):
        plain = text.replace(",", "")
        step = rng.choice((-1, 1))
        return str(float(plain) + step) if "." in plain else str(int(plain) + step)
    places = [i for i, letter in enumerate(text) if letter.isascii() and letter.isalnum()]
    if not places:
        return text + " x"
    place = places[-1]
    # z, Z and 9 have no next one; they get the one before.
    neighbour = chr(ord(text[place]) + (-1 if text[place] in "zZ9" else 1))
    return text[:place] + neighbour + text[place + 1 :]


def _changed_leaf(value: Any) -> tuple[Any, bool]:
    """A JSON value whose first leaf (a value that is no object or list) is wrong, and True.

    The bool says that something was changed, and always is True: an empty object or list gets a new
    member.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            other, done = _changed_leaf(item)
            if done:
                return {**value, key: other}, True
        return {**value, "x": 0}, True
    if isinstance(value, list):
        for index, item in enumerate(value):
            other, done = _changed_leaf(item)
            if done:
                return [*value[:index], other, *value[index + 1 :]], True
        return [*value, 0], True
    if isinstance(value, bool):  # before int, because a bool is an int in Python
        return not value, True
    if isinstance(value, int | float):
        return value + 1, True
    if isinstance(value, str):
        return changed(value, random.Random(0)) if value else "x", True
    return 0, True  # in place of null


def _emptied(value: Any) -> Any:
    """A JSON value with the same keys and types, but empty: {"a": "yes"} becomes {"a": ""}.

    Strings become "", numbers 0, bools False, lists []; null stays null.
    """
    if isinstance(value, dict):
        return {key: _emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return []
    if isinstance(value, bool) or value is None:
        return value if value is None else False
    return "" if isinstance(value, str) else 0


def _plain(text: str) -> str:
    """`text` in lower case and with single spaces, to compare texts by their words."""
    return " ".join(text.split()).casefold()


def message_probes(
    prompt: str,
    gold: Sequence[ChatMessage],
    others: Sequence[Sequence[ChatMessage]],
    rng: random.Random,
) -> dict[str, list[ChatMessage]]:
    """The probes of a multi-turn task: name -> assistant messages to be played in order.

    Most are the probes of `text_probes` for the last message of `gold`. Those that say nothing
    right are one message alone; those made from the right answer come after the earlier messages
    of `gold`.

    Args:
        prompt: the text of the task's prompt.
        gold: the assistant messages of its reference answer; empty if it has none.
        others: the same for other rows.
        rng: where random choices come from.
    """
    last = str(gold[-1].get("content") or "") if gold else ""
    texts = [str(other[-1].get("content") or "") for other in others if other]
    single = text_probes(prompt, last or None, texts, rng)
    names = ("empty", *LENGTHS, "prompt echo", "opener only", "filler", "enumerated")
    probes = {n: [_assistant(single[n])] for n in names if n in single}
    trigger = _assistant(single["exception trigger"])
    # Every second row tries a broken tool call in place of an odd text.
    if rng.random() < 0.5:
        trigger = _assistant("") | {"tool_calls": [_bad_call(rng)]}
    probes["exception trigger"] = [trigger]
    if not gold:
        return probes
    played: dict[str, list[ChatMessage]] = {GOLD: list(gold)}
    for name in (
        "off by one",
        "negated gold",
        "gold then wrong",
        "wrong then gold",
        "format only",
        OVERLONG,
    ):
        if name in single:
            played[name] = [*gold[:-1], _assistant(single[name])]
    if len(gold) > 1:
        played["truncated gold"] = list(gold[:-1])
        played["last message only"] = [gold[-1]]
    different = [other for other in others if list(other) != list(gold)]
    if different:
        played["other gold"] = list(rng.choice(different))
    return played | probes


def _assistant(text: str) -> ChatMessage:
    """A message of the assistant with this text."""
    return {"role": "assistant", "content": text}


def _bad_call(rng: random.Random) -> ChatMessage:
    """A faulty tool call as a model might make it: an unknown or empty name, or bad arguments."""
    name, arguments = rng.choice((("nothing", "{}"), ("", "{}"), ("lookup", "[1, 2]"), ("x", "{")))
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
