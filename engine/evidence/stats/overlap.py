"""Do training rows hold held-out tasks? Exact, normalised, and by long shared word sequences.

A held-out task leaks when its question (the prompt without system messages) stands in a training
row, or when its reference answer does and is long enough to be told from others:

- exact: the same text, white space around it aside;
- normalised: the same words, numbers and operators, whatever the case, spacing and punctuation;
- ngram: 13 words in a row that only this held-out task has, or half of its own 8-word sequences
  together with all of its numbers.

Word sequences that several held-out tasks share are their common form and are not counted, so
tasks made from one template do not accuse each other. Short tasks are compared exactly and
normalised only. Standard library and pure functions: nothing is read or written here.
"""

import math
import random
import re
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.evidence.stats.results import content_of
from envs.json_types import ChatMessage

Kind = Literal["exact", "normalised", "ngram"]
KINDS: tuple[Kind, ...] = ("exact", "normalised", "ngram")

GRAM = 8  # words of one indexed sequence
NGRAM = 13  # words in a row that are a copy by themselves
HALF = 0.5  # of a task's own sequences
FEWEST_GRAMS = 3
LEAST_TOKENS = 4  # of a question, to be looked for inside longer texts
ANSWER_TOKENS = 8  # of an answer, to be told from others by its words
LEAK_SHARE = 0.01  # of the held-out tasks, from which the exam as a whole is spoilt
MOST_GRAMS = 500_000  # held-out sequences that are indexed
MOST_CHARS = 200_000  # of one training row that are looked at
BUDGET_S = 5.0
SHOWN = 5

_COMMON = -1
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_OPERATORS = frozenset("- + * / ^ = < > % ± × ÷ √ ≤ ≥ ≠ ** // == <= >= !=".split())
_TOKEN = re.compile(
    rf"[{_CJK}]|[^\W_{_CJK}]+(?:[.,][0-9]+)*|\*\*|//|[=<>!]=|[-+*/^=<>%±×÷√≤≥≠]|[()\[\]]"
)
_DASHES = str.maketrans({"‐": "-", "‑": "-", "‒": "-", "–": "-", "−": "-", "⁄": "/", "·": "*"})
_APOSTROPHE = re.compile(r"(?<=[^\W\d_])['’](?=[^\W\d_])")
_SENTENCE = re.compile(r"(?<=[.?!])\s+")
_LABELS = {"q", "question", "problem", "task", "user", "prompt", "input", "exercise"}


@dataclass(frozen=True)
class Match:
    """One training row that holds one held-out task: how, and which part of the task.

    `spoils`: learning this row can teach the task, so the task cannot be judged by any more.
    """

    kind: Kind
    part: str  # "prompt" or "answer"
    heldout: str  # ids
    train: str
    spoils: bool = False

    @property
    def rank(self) -> tuple[bool, int, str]:
        """Strongest first; equal ones by the training row's id."""
        return (not self.spoils, KINDS.index(self.kind), self.train)


@dataclass
class _Unit:
    """A question or an answer of the held-out split; `ids` are the tasks that have it."""

    part: str
    ids: list[str]
    tokens: list[str]
    answer: list[str]
    own: int = 0  # sequences that no other unit has
    skipped: bool = False  # it has sequences, and none of them is indexed


class HeldOut:
    """The held-out tasks, indexed, to hold any number of training rows against.

    Args:
        rows: stored task rows (`prompt`, `answer`, `gold`), all of the held-out split.
        deadline: monotonic time after which no further task is indexed; the first always is.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], deadline: float = math.inf) -> None:
        self.units: list[_Unit] = []
        self._exact: dict[tuple[str, str], int] = {}
        self._same: dict[tuple[str, str], int] = {}
        self._grams: dict[tuple[str, ...], int] = {}
        self.tasks = 0
        for row in rows:
            self._add("prompt", str(row["id"]), question_of(row), answer_of(row), 1)
            self._add("answer", str(row["id"]), answer_of(row), "", ANSWER_TOKENS)
            self.tasks += 1
            if time.monotonic() > deadline:
                break
        for owner in self._grams.values():
            if owner != _COMMON:
                self.units[owner].own += 1

    @property
    def unindexed(self) -> int:
        """Tasks past the size of the index: compared exactly and normalised, not by sequences."""
        return len({task for unit in self.units if unit.skipped for task in unit.ids})

    def matches(self, row: Mapping[str, Any]) -> list[Match]:
        """What of the held-out split stands in a training row, each task by its strongest kind."""
        train = str(row.get("id"))
        strongest: dict[str, Match] = {}

        def note(kind: Kind, index: int | None, spoils: bool) -> None:
            if index is None:
                return
            for task in self.units[index].ids:
                match = Match(kind, self.units[index].part, task, train, spoils)
                if task not in strongest or match.rank < strongest[task].rank:
                    strongest[task] = match

        question, answer = question_of(row)[:MOST_CHARS], answer_of(row)[:MOST_CHARS]
        asked, answered = tokens_of(question), tokens_of(answer)
        note("exact", self._exact.get(("prompt", question)), True)
        note("exact", self._exact.get(("answer", answer)), False)
        note("normalised", self._same.get(("answer", " ".join(answered))), False)
        for key in _keys(asked):
            index = self._same.get(("prompt", key))
            if index is not None and _agree(self.units[index].answer, answered):
                note("normalised", index, True)
        for part, text in (("prompt", question), ("answer", answer)):
            for tokens in _segments(text, whole=part == "answer"):
                if len(tokens) >= LEAST_TOKENS:
                    for key in _keys(tokens):
                        # What stands in a prompt is read, not learnt.
                        note("normalised", self._same.get(("prompt", key)), part == "answer")
        for index in self._by_grams((asked, answered)):
            note("ngram", index, False)
        return list(strongest.values())

    def _add(self, part: str, task: str, text: str, answer: str, least: int) -> None:
        """Index one text of a held-out task; one shorter than `least` tokens is left out."""
        tokens = tokens_of(text)
        if len(tokens) < least:
            return
        key = (part, " ".join(tokens))
        index = self._same.get(key)
        if index is not None and (part, text) not in self._exact:
            # As one task where their answers agree: else case or punctuation tells them apart.
            if not _agree(self.units[index].answer, tokens_of(answer)):
                index = None
        elif index is not None:
            index = self._exact[(part, text)]
        if index is not None:
            self.units[index].ids.append(task)
            self._exact.setdefault((part, text), index)
            return
        index = len(self.units)
        self.units.append(_Unit(part, [task], tokens, tokens_of(answer)))
        self._same.setdefault(key, index)
        self._exact[(part, text)] = index
        if len(self._grams) > MOST_GRAMS:
            self.units[index].skipped = len(tokens) >= GRAM
            return
        for gram in _grams(tokens):
            if self._grams.setdefault(gram, index) != index:
                self._grams[gram] = _COMMON

    def _by_grams(self, texts: Iterable[Sequence[str]]) -> list[int]:
        """Units of which these texts hold a long sequence, or half with all their numbers."""
        if not self._grams:
            return []
        seen: dict[int, set[tuple[str, ...]]] = {}
        longest: dict[int, int] = {}
        numbers: set[str] = set()
        for tokens in texts:
            numbers |= _numbers(tokens)
            owner, run = _COMMON, 0
            for gram in _grams(tokens):
                index = self._grams.get(gram, _COMMON)
                run = run + 1 if index == owner else 1
                owner = index
                if index != _COMMON:
                    seen.setdefault(index, set()).add(gram)
                    longest[index] = max(longest.get(index, 0), run)
        return [
            index
            for index, grams in seen.items()
            if longest[index] + GRAM - 1 >= NGRAM
            or (
                len(grams) >= max(FEWEST_GRAMS, HALF * self.units[index].own)
                and _numbers(self.units[index].tokens) <= numbers
            )
        ]


def scan(
    train: Sequence[Mapping[str, Any]],
    heldout: Sequence[Mapping[str, Any]],
    budget_s: float = BUDGET_S,
) -> dict[str, Any]:
    """Hold every training row against the held-out tasks.

    Where `budget_s` seconds do not suffice, seeded random parts of both are compared, at least
    one row of each. Returns counts of held-out tasks by kind; `leaked`, the tasks that the
    training rows teach (asked there word for word); `compared`, the shares of the training rows
    and held-out tasks looked at; `unindexed`, the tasks among them that were not compared by word
    sequences because the index was full; examples; a headline; and the `verdict`: clean, overlap,
    or leak where more than 1 % of the tasks are taught.
    """
    began = time.monotonic()
    strongest: dict[str, Match] = {}
    index = HeldOut(_shuffled(heldout, train), began + budget_s / 2) if train else HeldOut([])
    compared_rows = 0
    for row in _shuffled(train, heldout) if heldout else ():
        for match in index.matches(row):
            if match.heldout not in strongest or match.rank < strongest[match.heldout].rank:
                strongest[match.heldout] = match
        compared_rows += 1
        if time.monotonic() > began + budget_s:
            break
    counts = {kind: sum(match.kind == kind for match in strongest.values()) for kind in KINDS}
    leaked = sorted(match.heldout for match in strongest.values() if match.spoils)
    shares = (_share(compared_rows, len(train)), _share(index.tasks, len(heldout)))
    if not (train and heldout):
        shares = (1.0, 1.0)
    order = sorted(strongest.values(), key=lambda match: (match.rank, match.heldout))
    verdict = "clean"
    if strongest:
        verdict = "leak" if len(leaked) > LEAK_SHARE * len(heldout) else "overlap"
    return {
        "verdict": verdict,
        "train": len(train),
        "heldout": len(heldout),
        **counts,
        "leaked": leaked,
        "compared": list(shares),
        "unindexed": index.unindexed,
        "examples": [
            {"kind": m.kind, "part": m.part, "heldout": m.heldout, "train": m.train}
            for m in order[:SHOWN]
        ],
        "headline": headline(
            len(heldout), len(train), counts, order, shares, unindexed=index.unindexed
        ),
    }


def headline(
    heldout: int,
    train: int,
    counts: Mapping[str, int],
    order: Sequence[Match],
    shares: tuple[float, float] = (1.0, 1.0),
    *,
    unindexed: int = 0,
) -> str:
    """What was found in one sentence, the first pair named, and what was not looked at."""
    limits = []
    if min(shares) < 1:
        limits.append(f"{shares[0]:.0%} of the rows and {shares[1]:.0%} of the tasks were compared")
    if unindexed:
        limits.append(
            f"{unindexed} tasks are past the {MOST_GRAMS:,} word sequences that are indexed and "
            "were compared as a whole only"
        )
    part = f" ({'; '.join(limits)})" if limits else ""
    total = sum(counts.values())
    if not total:
        return f"none of {heldout} held-out tasks overlaps with the {train} training rows{part}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    first = order[0]
    return (
        f"{total} of {heldout} held-out tasks overlap with training rows ({kinds}), "
        f"such as {first.heldout[:60]!r} with {first.train[:60]!r}{part}"
    )


def question_of(row: Mapping[str, Any]) -> str:
    """The text of a task's prompt, system messages aside."""
    turns = [message for message in row.get("prompt") or [] if message.get("role") != "system"]
    return "\n".join(content_of(turn) for turn in turns).strip()


def answer_of(row: Mapping[str, Any]) -> str:
    """The text of what the model is to say; "" where there is no reference answer."""
    turns = [turn for turn in _after_prompt(row) if turn.get("role") == "assistant"]
    return "\n".join(content_of(turn) for turn in turns).strip()


def tokens_of(text: str) -> list[str]:
    """Words, numbers and the operators between them, in one case and one form.

    Operators count only where they have numbers or single letters to work on, brackets only
    beside an operator: elsewhere they are punctuation, or markup.
    """
    text = unicodedata.normalize("NFKC", text[:MOST_CHARS]).casefold().translate(_DASHES)
    raw = _TOKEN.findall(_APOSTROPHE.sub("", text))
    kept: list[str] = []
    for index, token in enumerate(raw):
        if token in _OPERATORS:
            left, right = _is_operand(raw, index - 1), _is_operand(raw, index + 1)
            minus = index + 1 < len(raw) and raw[index + 1] == "-"
            signed = minus and _is_operand(raw, index + 2)
            if not {"%": left, "-": right, "√": right}.get(token, left and (right or signed)):
                continue
        elif token in "([":
            if index == 0 or raw[index - 1] not in _OPERATORS:
                continue
        elif token in ")]" and (index + 1 == len(raw) or raw[index + 1] not in _OPERATORS):
            continue
        kept.append(token)
    return kept


def _is_operand(raw: Sequence[str], index: int) -> bool:
    """Whether a number, a single letter, or a bracket beside one stands there."""
    if not 0 <= index < len(raw):
        return False
    token = raw[index]
    if token in _OPERATORS:
        return False
    if token in "([":
        inside = index + 1
        return inside < len(raw) and raw[inside] not in "([" and _is_operand(raw, inside)
    if token in ")]":
        return raw[index - 1] not in ")]" and _is_operand(raw, index - 1)
    return len(token) == 1 or token[0].isdigit()


def _agree(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether one answer stands in the other; no answer agrees with every one."""
    short, long = sorted((list(one), list(other)), key=len)
    last = len(long) - len(short)
    return not short or any(long[start : start + len(short)] == short for start in range(last + 1))


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


def _shuffled(
    rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The rows in an order that a time limit may cut anywhere; the same for the same rows."""
    return random.Random(f"{len(rows)} {len(others)}").sample(list(rows), len(rows))


def _after_prompt(row: Mapping[str, Any]) -> list[ChatMessage]:
    gold = row.get("gold")
    if isinstance(gold, list):
        return gold[len(row.get("prompt") or []) :]
    return row.get("answer") or []


def _segments(text: str, whole: bool) -> Iterable[list[str]]:
    """Tokens of a text's lines and of their sentences; of all of it where `whole`."""
    lines = [line for line in text.split("\n") if line.strip()]
    if whole and text:
        yield tokens_of(text)
    for line in lines:
        if len(lines) > 1:
            yield tokens_of(line)
        sentences = _SENTENCE.split(line)
        if len(sentences) > 1:
            for sentence in sentences:
                yield tokens_of(sentence)


def _keys(tokens: Sequence[str]) -> list[str]:
    """What a segment is looked up by; also without a label such as `Question:`."""
    keys = [" ".join(tokens)]
    if len(tokens) > 1 and tokens[0] in _LABELS:
        keys.append(" ".join(tokens[1:]))
    return keys


def _grams(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(tokens[start : start + GRAM]) for start in range(len(tokens) - GRAM + 1))


def _numbers(tokens: Iterable[str]) -> set[str]:
    return {token for token in tokens if token[0].isdigit()}
