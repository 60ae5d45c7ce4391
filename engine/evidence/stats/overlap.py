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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.evidence.stats.results import content_of
from envs.json_types import ChatMessage

Kind = Literal["exact", "normalised", "ngram"]
KINDS: tuple[Kind, ...] = ("exact", "normalised", "ngram")

GRAM_WORDS = 8  # words of one indexed sequence
COPIED_WORDS = 13  # words in a row that are a copy by themselves
LARGE_SHARE = 0.5  # this share of the sequences that only one task has counts as the task...
FEWEST_GRAMS = 3  # ...if it is at least this many sequences
LEAST_TOKENS = 4  # a shorter question inside a longer text does not count
ANSWER_TOKENS = 8  # shorter answers cannot be told from others by their words
LEAK_SHARE = 0.01  # above this share of leaked held-out tasks the exam as a whole is spoilt
MOST_GRAMS = 500_000  # held-out sequences that are indexed; bounds the memory
MOST_CHARS = 200_000  # of one text that are compared
MOST_COMPARED = 200_000  # rows of one side that are compared
BUDGET_S = 5.0  # seconds that a scan may take, as a submit waits for it
SHOWN = 5  # examples in a result
ID_CHARS = 60  # of an id in a sentence

_COMMON = -1  # in the index of sequences: several held-out tasks have this one
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
    """One training row that holds one held-out task, or a part of it.

    Attributes:
        kind: how the texts match.
        part: which part of the held-out task stands in the row.
        heldout, train: ids of the task and of the row.
        spoils: whether learning this row can teach the task; then no model can be judged by it.
    """

    kind: Kind
    part: str  # "prompt" or "answer"
    heldout: str
    train: str
    spoils: bool = False

    @property
    def rank(self) -> tuple[bool, int, str]:
        """A key that sorts the strongest match first; equal ones by the training row's id."""
        return (not self.spoils, KINDS.index(self.kind), self.train)

    def to_json(self) -> dict[str, str]:
        """The match as results list it; `leaked` there says which tasks are spoilt."""
        return {
            "kind": self.kind,
            "part": self.part,
            "heldout": self.heldout,
            "train": self.train,
        }


@dataclass
class _Unit:
    """A question or an answer of the held-out split; equal ones of several tasks are one unit.

    Attributes:
        part: "prompt" or "answer".
        ids: the tasks that have it.
        tokens: of the text itself.
        answer: of the reference answer to a question; [] for an answer.
    """

    part: str
    ids: list[str]
    tokens: list[str]
    answer: list[str]
    unique_grams: int = 0  # how many of its word sequences no other unit has
    skipped: bool = False  # whether it has sequences that the full index could not take


@dataclass(frozen=True)
class _Hit:
    """A unit that a training row matches; `position` is its place in the list of units.

    `spoils` says whether learning the row can teach the tasks of the unit (see `Match`).
    """

    kind: Kind
    position: int
    spoils: bool


class HeldOut:
    """An index of the held-out tasks; any number of training rows can be compared with it.

    Args:
        rows: stored task rows (`prompt`, `answer`, `gold`), all of the held-out split.
        deadline: monotonic time after which no further task is indexed; the first always is.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], deadline: float = math.inf) -> None:
        """Index the rows: by text, by normalised text and by word sequences.

        The indices hold positions in `units`; `tasks` is how many rows were indexed in time.
        """
        self.units: list[_Unit] = []
        # The keys are (part, text) and (part, tokens joined by blanks).
        self._exact: dict[tuple[str, str], int] = {}
        self._normalised: dict[tuple[str, str], int] = {}
        self._grams: dict[tuple[str, ...], int] = {}  # word sequence -> position, or _COMMON
        self.tasks = 0
        for row in rows:
            task, answer = str(row["id"]), answer_of(row)
            # Every question is indexed; of the answers only those long enough to be told apart.
            self._add("prompt", task, question_of(row), answer=answer, fewest_tokens=1)
            self._add("answer", task, answer, answer="", fewest_tokens=ANSWER_TOKENS)
            self.tasks += 1
            if time.monotonic() > deadline:
                break
        for owner in self._grams.values():
            if owner != _COMMON:
                self.units[owner].unique_grams += 1

    @property
    def unindexed(self) -> int:
        """How many tasks did not fit into the index of sequences.

        They are compared exactly and normalised only.
        """
        return len({task for unit in self.units if unit.skipped for task in unit.ids})

    def matches(self, row: Mapping[str, Any]) -> list[Match]:
        """The held-out tasks that stand in a training row, each with its strongest match.

        `row` is a stored task row of the training split.
        """
        question, answer = question_of(row)[:MOST_CHARS], answer_of(row)[:MOST_CHARS]
        question_tokens, answer_tokens = tokens_of(question), tokens_of(answer)
        sharing_grams = self._units_sharing_grams((question_tokens, answer_tokens))
        hits = [
            *self._equal_texts(question, answer),
            *self._equal_words(question_tokens, answer_tokens),
            *self._questions_in_parts(question, answer),
            *(_Hit("ngram", position, spoils=False) for position in sharing_grams),
        ]
        train_id = str(row.get("id"))
        strongest: dict[str, Match] = {}  # task id -> its strongest match so far
        for hit in hits:
            unit = self.units[hit.position]
            for task in unit.ids:
                match = Match(hit.kind, unit.part, task, train_id, hit.spoils)
                if task not in strongest or match.rank < strongest[task].rank:
                    strongest[task] = match
        return list(strongest.values())

    def _equal_texts(self, question: str, answer: str) -> Iterator[_Hit]:
        """The units that equal the question or the answer of a training row letter for letter.

        The same question spoils the task. The same answer alone does not: it may be chance.
        """
        for part, text, spoils in (("prompt", question, True), ("answer", answer, False)):
            position = self._exact.get((part, text))
            if position is not None:
                yield _Hit("exact", position, spoils)

    def _equal_words(
        self, question_tokens: Sequence[str], answer_tokens: Sequence[str]
    ) -> Iterator[_Hit]:
        """The units that have the same words as the answer or the question of a training row.

        With another answer the same words of a question are another task.
        """
        position = self._normalised.get(("answer", " ".join(answer_tokens)))
        if position is not None:
            yield _Hit("normalised", position, spoils=False)
        for key in _lookup_keys(question_tokens):
            position = self._normalised.get(("prompt", key))
            if position is not None and _answers_agree(self.units[position].answer, answer_tokens):
                yield _Hit("normalised", position, spoils=True)

    def _questions_in_parts(self, question: str, answer: str) -> Iterator[_Hit]:
        """The held-out questions that are a line or a sentence of a training row.

        In the answer, which training learns to write, that spoils the task; in the prompt it does
        not. A question that is the whole prompt is found by `_equal_words`.
        """
        for position in self._questions_inside(question, with_entire_text=False):
            yield _Hit("normalised", position, spoils=False)
        for position in self._questions_inside(answer, with_entire_text=True):
            yield _Hit("normalised", position, spoils=True)

    def _questions_inside(self, text: str, *, with_entire_text: bool) -> Iterable[int]:
        """Positions of the units whose question is a line or a sentence of `text`.

        With `with_entire_text` also of those whose question is all of the text. Segments of fewer
        than `LEAST_TOKENS` tokens do not count.
        """
        for tokens in _segments(text, with_entire_text=with_entire_text):
            if len(tokens) >= LEAST_TOKENS:
                for key in _lookup_keys(tokens):
                    if ("prompt", key) in self._normalised:
                        yield self._normalised["prompt", key]

    def _add(self, part: str, task: str, text: str, *, answer: str, fewest_tokens: int) -> None:
        """Index one text of a held-out task, as a new unit or as one that is indexed already.

        Args:
            part: "prompt" or "answer".
            task: the task's id.
            text: the question or the answer itself.
            answer: the reference answer to a question; "" for an answer.
            fewest_tokens: a text with fewer tokens is not indexed.
        """
        tokens = tokens_of(text)
        if len(tokens) < fewest_tokens:
            return
        unit = _Unit(part, [task], tokens, tokens_of(answer))
        index = self._equal_unit(unit, text)
        if index is not None:
            self.units[index].ids.append(task)
            self._exact.setdefault((part, text), index)
            return
        index = len(self.units)
        self.units.append(unit)
        self._normalised.setdefault((part, " ".join(tokens)), index)
        self._exact[part, text] = index
        self._add_grams(unit, index)

    def _add_grams(self, unit: _Unit, index: int) -> None:
        """Index the word sequences of the unit at `index`, if the index has room for them."""
        if len(self._grams) > MOST_GRAMS:  # the index is full
            unit.skipped = len(unit.tokens) >= GRAM_WORDS
            return
        for gram in _grams(unit.tokens):
            if self._grams.setdefault(gram, index) != index:  # another unit has it already
                self._grams[gram] = _COMMON

    def _equal_unit(self, unit: _Unit, text: str) -> int | None:
        """The position of an indexed unit that equals the new one with this text, else None."""
        if (unit.part, text) in self._exact:
            return self._exact[unit.part, text]
        index = self._normalised.get((unit.part, " ".join(unit.tokens)))
        # The same words written differently are one unit only if their answers agree too: otherwise
        # case or punctuation is what the task is about.
        if index is None or not _answers_agree(self.units[index].answer, unit.answer):
            return None
        return index

    def _units_sharing_grams(self, texts: Iterable[Sequence[str]]) -> list[int]:
        """Positions of the units of which these texts contain a large part.

        A large part is a run of `COPIED_WORDS` words that only this unit has, or half of the
        sequences that only this unit has, together with all of its numbers. `texts` are lists of
        tokens.
        """
        if not self._grams:
            return []
        grams_by_unit: dict[int, set[tuple[str, ...]]] = {}
        # Position of a unit -> how many of its sequences follow one another, at most.
        longest_run: dict[int, int] = {}
        numbers: set[str] = set()  # in all of the texts
        for tokens in texts:
            numbers |= _numbers(tokens)
            previous_index = _COMMON
            run = 0
            for gram in _grams(tokens):
                index = self._grams.get(gram, _COMMON)
                run = run + 1 if index == previous_index else 1
                previous_index = index
                if index != _COMMON:
                    grams_by_unit.setdefault(index, set()).add(gram)
                    longest_run[index] = max(longest_run.get(index, 0), run)
        positions = []
        for index, grams in grams_by_unit.items():
            # The first sequence has `GRAM_WORDS` words, each that follows it adds one.
            words_in_a_row = longest_run[index] + GRAM_WORDS - 1
            if words_in_a_row >= COPIED_WORDS or self._is_large_part(index, grams, numbers):
                positions.append(index)
        return positions

    def _is_large_part(self, index: int, grams: set[tuple[str, ...]], numbers: set[str]) -> bool:
        """Whether half of the sequences that only one unit has, and all of its numbers, are given.

        `index` is the position of the unit; `grams` are those of its own sequences, and `numbers`
        are all numbers, that a row contains.
        """
        unit = self.units[index]
        fewest_grams = max(FEWEST_GRAMS, LARGE_SHARE * unit.unique_grams)
        return len(grams) >= fewest_grams and _numbers(unit.tokens) <= numbers


def scan(
    train: Sequence[Mapping[str, Any]],
    heldout: Sequence[Mapping[str, Any]],
    budget_s: float = BUDGET_S,
) -> dict[str, Any]:
    """Compare every training row with the held-out tasks.

    Where `budget_s` seconds are not enough, a random part of the rows and of the tasks is compared,
    at least one of each. The same rows always give the same random order.

    Returns a JSON object:
        verdict: clean, overlap, or leak where more than 1 % of the held-out tasks are leaked.
        train, heldout: how many rows and tasks there are.
        exact, normalised, ngram: how many held-out tasks overlap, by their strongest match.
        leaked: ids of the tasks that the training rows teach (they ask them word for word).
        compared: [share of the training rows, share of the held-out tasks] that were compared;
            [1, 1] where there is nothing to compare.
        unindexed: how many of these tasks were not compared by word sequences, because the index
            was full.
        examples: a few matches, the strongest first.
        headline: the result in a sentence.
    """
    strongest, index, compared_shares = _compare_in_time(train, heldout, budget_s)
    counts = {kind: sum(match.kind == kind for match in strongest.values()) for kind in KINDS}
    leaked = sorted(match.heldout for match in strongest.values() if match.spoils)
    strongest_first = sorted(strongest.values(), key=lambda match: (match.rank, match.heldout))
    verdict = "clean"
    if strongest:
        verdict = "leak" if len(leaked) > LEAK_SHARE * len(heldout) else "overlap"
    return {
        "verdict": verdict,
        "train": len(train),
        "heldout": len(heldout),
        **counts,
        "leaked": leaked,
        "compared": list(compared_shares),
        "unindexed": index.unindexed,
        "examples": [match.to_json() for match in strongest_first[:SHOWN]],
        "headline": headline(
            heldout=len(heldout),
            train=len(train),
            counts=counts,
            matches=strongest_first,
            compared_shares=compared_shares,
            unindexed=index.unindexed,
        ),
    }


def _compare_in_time(
    train: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]], budget_s: float
) -> tuple[dict[str, Match], HeldOut, tuple[float, float]]:
    """Compare as many training rows with as many held-out tasks as `budget_s` seconds allow.

    Returns (held-out task id -> its strongest match, the index of the tasks, (share of the rows,
    share of the tasks) that were compared).
    """
    started_at = time.monotonic()
    if not train or not heldout:
        return {}, HeldOut([]), (1.0, 1.0)
    # Half of the time is for indexing.
    index = HeldOut(_shuffled(heldout, train), deadline=started_at + budget_s / 2)
    strongest, compared_rows = _strongest_matches(
        index, _shuffled(train, heldout), deadline=started_at + budget_s
    )
    rows_share = round(compared_rows / len(train), 4)
    tasks_share = round(index.tasks / len(heldout), 4)
    return strongest, index, (rows_share, tasks_share)


def _strongest_matches(
    index: HeldOut, rows: Iterable[Mapping[str, Any]], deadline: float
) -> tuple[dict[str, Match], int]:
    """Held-out task id -> its strongest match with any of the training rows.

    The second result is how many rows were compared. After `deadline` (monotonic time) no further
    row is compared; the first always is.
    """
    strongest: dict[str, Match] = {}
    compared_rows = 0
    for row in rows:
        for match in index.matches(row):
            if match.heldout not in strongest or match.rank < strongest[match.heldout].rank:
                strongest[match.heldout] = match
        compared_rows += 1
        if time.monotonic() > deadline:
            break
    return strongest, compared_rows


def headline(
    heldout: int,
    train: int,
    counts: Mapping[str, int],
    matches: Sequence[Match],
    *,
    compared_shares: tuple[float, float] = (1.0, 1.0),
    unindexed: int = 0,
) -> str:
    """The result of a scan in one sentence.

    For example "3 of 200 held-out tasks overlap with training rows (1 exact, 2 ngram), such as
    'h-7' with 't-12'".

    Args:
        heldout, train: how many held-out tasks and training rows there are.
        counts: kind of match -> how many held-out tasks overlap in this way.
        matches: the strongest first; the first one is named as an example.
        compared_shares: which share of the rows and which share of the tasks was compared.
        unindexed: how many tasks were not compared by word sequences.
    """
    restrictions = []
    rows_share, tasks_share = compared_shares
    if rows_share < 1 or tasks_share < 1:
        restrictions.append(
            f"{rows_share:.0%} of the rows and {tasks_share:.0%} of the tasks were compared"
        )
    if unindexed:
        restrictions.append(
            f"{unindexed} tasks are past the {MOST_GRAMS:,} word sequences that are indexed and "
            "were compared as a whole only"
        )
    remark = f" ({'; '.join(restrictions)})" if restrictions else ""
    total = sum(counts.values())
    if not total:
        return f"none of {heldout} held-out tasks overlaps with the {train} training rows{remark}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    first = matches[0]
    return (
        f"{total} of {heldout} held-out tasks overlap with training rows ({kinds}), "
        f"such as {first.heldout[:ID_CHARS]!r} with {first.train[:ID_CHARS]!r}{remark}"
    )


def question_of(row: Mapping[str, Any]) -> str:
    """The text of a task's prompt without its system messages; `row` is a stored task row."""
    turns = [message for message in row.get("prompt") or [] if message.get("role") != "system"]
    return "\n".join(content_of(turn) for turn in turns).strip()


def answer_of(row: Mapping[str, Any]) -> str:
    """The text of a task's reference answer; "" where it has none. `row` is a stored task row.

    Only the assistant's messages count; those of tools or users between them are left out.
    """
    turns = [turn for turn in _after_prompt(row) if turn.get("role") == "assistant"]
    return "\n".join(content_of(turn) for turn in turns).strip()


def tokens_of(text: str) -> list[str]:
    """The words, numbers and operators of a text in a normalised form.

    Case, spacing, apostrophes and the many kinds of dashes make no difference. An operator counts
    only where it has operands (numbers or single letters), and a bracket only beside an operator:
    elsewhere they are punctuation or markup and are left out.
    """
    text = unicodedata.normalize("NFKC", text[:MOST_CHARS]).casefold().translate(_DASHES)
    raw = _TOKEN.findall(_APOSTROPHE.sub("", text))
    return [token for index, token in enumerate(raw) if _has_meaning(raw, index)]


def _has_meaning(raw: Sequence[str], index: int) -> bool:
    """Whether the token at `index` is more than punctuation or markup.

    An operator has meaning if it has operands, an opening bracket if an operator stands before it,
    and a closing bracket if an operator follows it. Any other token has meaning.
    """
    token = raw[index]
    if token in _OPERATORS:
        return _has_operands(raw, index)
    if token in "([":
        return index > 0 and raw[index - 1] in _OPERATORS
    if token in ")]":
        return index + 1 < len(raw) and raw[index + 1] in _OPERATORS
    return True


def _has_operands(raw: Sequence[str], index: int) -> bool:
    """Whether the operator at `index` has the operands that it needs."""
    left, right = _is_operand(raw, index - 1), _is_operand(raw, index + 1)
    # Three operators need an operand on one side only: 5%, -3, √2.
    if raw[index] == "%":
        return left
    if raw[index] in "-√":
        return right
    # The operand on the right may have a sign, as in 3 * -2.
    minus_follows = index + 1 < len(raw) and raw[index + 1] == "-"
    return left and (right or (minus_follows and _is_operand(raw, index + 2)))


def _is_operand(raw: Sequence[str], index: int) -> bool:
    """Whether an operand stands at `index`: a number, a single letter, or the bracket beside one.

    `raw` are the tokens of a text. False where `index` is not in the list.
    """
    if not 0 <= index < len(raw):
        return False
    token = raw[index]
    if token in _OPERATORS:
        return False
    if token in "()[]":
        # The bracket stands for the token next to it, on its inside, which may be no bracket again.
        inside = index + 1 if token in "([" else index - 1
        return 0 <= inside < len(raw) and raw[inside] not in "()[]" and _is_operand(raw, inside)
    return len(token) == 1 or token[0].isdigit()


def _answers_agree(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether the shorter of two answers (as tokens) stands in the longer one.

    An empty answer agrees with every other: there is nothing that could contradict.
    """
    shorter, longer = sorted((list(first), list(second)), key=len)
    last_start = len(longer) - len(shorter)
    return any(longer[start : start + len(shorter)] == shorter for start in range(last_start + 1))


def _shuffled(
    rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """`rows` in random order, so that those compared before a time limit are a fair sample.

    `others` are the rows that they are compared with. The random seed is the two numbers of rows,
    so the order is the same every time. Of more than MOST_COMPARED rows only so many are given;
    each is taken from `rows` when its turn comes.
    """
    chance = random.Random(f"{len(rows)} {len(others)}")
    order = chance.sample(range(len(rows)), min(len(rows), MOST_COMPARED))
    return (rows[index] for index in order)


def _after_prompt(row: Mapping[str, Any]) -> list[ChatMessage]:
    """The messages after the prompt: those of the gold conversation, else of the stored answer."""
    gold = row.get("gold")
    if isinstance(gold, list):  # the gold conversation begins with the prompt
        return gold[len(row.get("prompt") or []) :]
    return row.get("answer") or []


def _segments(text: str, *, with_entire_text: bool) -> Iterable[list[str]]:
    """The tokens of the lines of a text, each followed by those of its sentences.

    A line counts only if the text has several, a sentence only if its line has several. With
    `with_entire_text`, the tokens of the entire text come first.
    """
    if with_entire_text and text:
        yield tokens_of(text)
    lines = [line for line in text.split("\n") if line.strip()]
    for line in lines:
        if len(lines) > 1:
            yield tokens_of(line)
        sentences = _SENTENCE.split(line)
        if len(sentences) > 1:
            for sentence in sentences:
                yield tokens_of(sentence)


def _lookup_keys(tokens: Sequence[str]) -> list[str]:
    """The keys under which a segment may be indexed: all its tokens, joined by blanks.

    Where it begins with a label like `Question:`, also its tokens without the label.
    """
    keys = [" ".join(tokens)]
    if len(tokens) > 1 and tokens[0] in _LABELS:
        keys.append(" ".join(tokens[1:]))
    return keys


def _grams(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Every sequence of `GRAM_WORDS` neighbouring tokens; none for a shorter text."""
    starts = range(len(tokens) - GRAM_WORDS + 1)
    return (tuple(tokens[start : start + GRAM_WORDS]) for start in starts)


def _numbers(tokens: Iterable[str]) -> set[str]:
    """The tokens that are numbers, each once."""
    return {token for token in tokens if token[0].isdigit()}
