"""Do training rows hold held-out tasks? Exact, normalised, and by long shared word sequences.

A held-out task leaks if its question (the prompt without system messages) stands in a training row,
or if its reference answer does and is long enough to be told from others:

- exact: the same text, apart from white space around it;
- normalised: the same words, numbers and operators, whatever the case, spacing and punctuation;
- ngram: 13 words in a row that only this held-out task has, or half of its own 8-word sequences (at
  least 3) together with all of its numbers.

Word sequences that several held-out tasks share are their common template and are not counted, so
tasks made from one template do not accuse each other. Short tasks are compared exactly and
normalised only. Twins, which hold none of a task's texts and teach it all the same, are those of
the package twins. Standard library and pure functions: nothing is read or written here.
"""

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.core.format import whole_percent
from engine.evidence.overlap import twin_scan
from engine.evidence.overlap.row_texts import answer_of, question_of
from engine.evidence.overlap.twin_scan import RowTexts
from engine.evidence.overlap.words import (
    GRAM_WORDS,
    MOST_CHARS,
    answers_agree,
    grams_of,
    lookup_keys,
    numbers_of,
    segments,
    tokens_of,
)

Kind = Literal["exact", "normalised", "ngram"]
KINDS: tuple[Kind, ...] = ("exact", "normalised", "ngram")

COPIED_WORDS = 13  # words in a row that are a copy by themselves
LARGE_SHARE = 0.5  # a row with this share of the sequences that only one task has, holds the task
FEWEST_GRAMS = 3  # if these are at least this many sequences
LEAST_TOKENS = 4  # a shorter question inside a longer text does not count
ANSWER_TOKENS = 8  # shorter answers cannot be told from others by their words
LEAK_SHARE = 0.01  # above this share of leaked held-out tasks the whole split is spoilt
MOST_GRAMS = 500_000  # held-out sequences that are indexed; bounds the memory
MOST_COMPARED = 200_000  # rows of one side that are compared
BUDGET_S = 5.0  # seconds that a scan may take, as a submit waits for it
SHOWN = 5  # examples in a result
ID_CHARS = 60  # of an id in a sentence

_COMMON = -1  # in the index of sequences, in place of a position: several units have the sequence


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
        """A sort key that puts the strongest match first; equal ones are ordered by the training
        row's id."""
        return (not self.spoils, KINDS.index(self.kind), self.train)

    def to_json(self) -> dict[str, str]:
        """The match as a JSON object. `spoils` is left out: the list `leaked` of a scan holds
        spoilt tasks."""
        return {
            "kind": self.kind,
            "part": self.part,
            "heldout": self.heldout,
            "train": self.train,
        }


@dataclass
class _Unit:
    """A question or an answer of the held-out split; equal texts of several tasks are one unit.

    Attributes:
        part: "prompt" or "answer".
        ids: the tasks that have this text.
        tokens: of the text itself.
        answer: tokens of the reference answer to a question; [] for an answer.
    """

    part: str
    ids: list[str]
    tokens: list[str]
    answer: list[str]
    unique_grams: int = 0  # how many of its word sequences no other unit has
    skipped: bool = False  # whether it has sequences that the full index could not take


@dataclass(frozen=True)
class _Hit:
    """A unit (held-out question or answer) that a row matches; `position` is its place in `units`.

    `spoils` says whether learning the row can teach the tasks of the unit (see `Match`).
    """

    kind: Kind
    position: int
    spoils: bool


@dataclass
class _SharedGrams:
    """The word sequences (grams) that a training row shares with one held-out text alone."""

    grams: set[tuple[str, ...]] = field(default_factory=set)
    longest_run: int = 0  # how many of them follow one another, at most

    @property
    def words_in_a_row(self) -> int:
        """The length in words of the longest shared passage: the first sequence has `GRAM_WORDS`
        words, and each that follows it directly adds one."""
        return self.longest_run + GRAM_WORDS - 1


class HeldOut:
    """An index of the held-out tasks; any number of training rows can be compared with it.

    Args:
        rows: stored task rows (`prompt`, `answer`, `gold`), all of the held-out split.
        deadline: monotonic time after which no further task is indexed; the first always is.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], deadline: float = math.inf) -> None:
        """Index the rows: by text, by normalised text and by word sequences.

        Each question and each answer is a unit; `tasks` is how many rows were indexed in time.
        """
        self.units: list[_Unit] = []
        # Three ways to find a unit, by its position in `units`. The keys of the first two are
        # (part, text) and (part, tokens joined by blanks).
        self._exact: dict[tuple[str, str], int] = {}
        self._normalised: dict[tuple[str, str], int] = {}
        self._grams: dict[tuple[str, ...], int] = {}  # word sequence; _COMMON if of several units
        self.tasks = 0
        for row in rows:
            self._add_task(row)
            self.tasks += 1
            if time.monotonic() > deadline:
                break
        self._count_unique_grams()

    def _count_unique_grams(self) -> None:
        """Count for each unit (held-out question or answer) the word sequences that no other unit
        has."""
        for position in self._grams.values():
            if position != _COMMON:
                self.units[position].unique_grams += 1

    @property
    def unindexed(self) -> int:
        """How many tasks did not fit into the index of word sequences, so that they are compared as
        whole texts only."""
        tasks: set[str] = set()
        for unit in self.units:
            if unit.skipped:
                tasks |= set(unit.ids)
        return len(tasks)

    def matches(self, row: Mapping[str, Any]) -> list[Match]:
        """The strongest match of each held-out task that a training row holds, whole or in part.

        `row` is a stored task row of the training split.
        """
        question, answer = question_of(row)[:MOST_CHARS], answer_of(row)[:MOST_CHARS]
        train_id = str(row.get("id"))
        strongest: dict[str, Match] = {}
        for hit in self._hits(question, answer):
            unit = self.units[hit.position]
            for task in unit.ids:
                match = Match(hit.kind, unit.part, task, train=train_id, spoils=hit.spoils)
                _keep_stronger(strongest, match)
        return list(strongest.values())

    def _hits(self, question: str, answer: str) -> list[_Hit]:
        """All ways in which a training row matches a unit, a held-out question or answer.

        `question` and `answer` are the texts of the training row.
        """
        question_tokens, answer_tokens = tokens_of(question), tokens_of(answer)
        sharing_positions = self._units_sharing_grams((question_tokens, answer_tokens))
        return [
            *self._equal_texts(question, answer),
            *self._equal_words(question_tokens, answer_tokens),
            *self._questions_in_parts(question, answer),
            *(_Hit("ngram", position, spoils=False) for position in sharing_positions),
        ]

    def _equal_texts(self, question: str, answer: str) -> Iterator[_Hit]:
        """The units (held-out texts) that equal a row's question or answer letter for letter.

        The same question spoils the task. The same answer alone does not: it may be chance.
        """
        for part, text, spoils in (("prompt", question, True), ("answer", answer, False)):
            position = self._exact.get((part, text))
            if position is not None:
                yield _Hit("exact", position, spoils)

    def _equal_words(
        self, question_tokens: Sequence[str], answer_tokens: Sequence[str]
    ) -> Iterator[_Hit]:
        """The units (held-out texts) that have the same words as a row's question or answer.

        A question with the same words but another answer is another task, hence no match. Equal
        questions spoil a task (learning the row teaches it); equal answers may be chance.
        """
        position = self._normalised.get(("answer", " ".join(answer_tokens)))
        if position is not None:
            yield _Hit("normalised", position, spoils=False)
        for key in lookup_keys(question_tokens):
            position = self._normalised.get(("prompt", key))
            if position is None:
                continue
            if answers_agree(self.units[position].answer, answer_tokens):
                yield _Hit("normalised", position, spoils=True)

    def _questions_in_parts(self, prompt: str, answer: str) -> Iterator[_Hit]:
        """The held-out questions that are a line or a sentence of a training row's text.

        In the row's answer, which training learns to write, a question spoils the task; in its
        prompt not. A question that is the whole prompt is a match of `_equal_words`.
        """
        for position in self._questions_inside(prompt, with_entire_text=False):
            yield _Hit("normalised", position, spoils=False)
        for position in self._questions_inside(answer, with_entire_text=True):
            yield _Hit("normalised", position, spoils=True)

    def _questions_inside(self, text: str, *, with_entire_text: bool) -> Iterable[int]:
        """Positions of the units (held-out texts) whose question is a line or a sentence of `text`.

        With `with_entire_text` also of units whose question is the whole text. Segments of fewer
        than `LEAST_TOKENS` tokens do not count.
        """
        for tokens in segments(text, with_entire_text=with_entire_text):
            if len(tokens) >= LEAST_TOKENS:
                for key in lookup_keys(tokens):
                    if ("prompt", key) in self._normalised:
                        yield self._normalised["prompt", key]

    def _add_task(self, row: Mapping[str, Any]) -> None:
        """Index the question and the reference answer of a held-out task."""
        task, answer = str(row["id"]), answer_of(row)
        # Every question is indexed; of the answers only those long enough to be told apart.
        self._index_text("prompt", task, question_of(row), answer=answer, fewest_tokens=1)
        # `answer` tells equal questions apart; a unit that is an answer itself needs none.
        self._index_text("answer", task, answer, answer="", fewest_tokens=ANSWER_TOKENS)

    def _index_text(
        self, part: str, task: str, text: str, *, answer: str, fewest_tokens: int
    ) -> None:
        """Index one text of a held-out task, as a new unit (indexed text) or as one that exists
        already.

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
        unit = _Unit(part, ids=[task], tokens=tokens, answer=tokens_of(answer))
        position = self._equal_unit(unit, text)
        if position is None:
            self._add_unit(unit, text)
        else:
            self.units[position].ids.append(task)
            # The unit may have the words in another spelling: index this spelling as well.
            self._exact.setdefault((part, text), position)

    def _add_unit(self, unit: _Unit, text: str) -> None:
        """Index a new unit (held-out question or answer) by its text, its tokens and its word
        sequences."""
        position = len(self.units)
        self.units.append(unit)
        # An earlier unit with the same words but another answer keeps its entry here.
        self._normalised.setdefault((unit.part, " ".join(unit.tokens)), position)
        self._exact[unit.part, text] = position
        self._add_grams(unit, position)

    def _add_grams(self, unit: _Unit, position: int) -> None:
        """Index the word sequences of the unit (held-out text) at `position`, if the index has room
        for them."""
        if len(self._grams) > MOST_GRAMS:  # the index is full
            # A text shorter than one sequence has none, so nothing of it is left out.
            unit.skipped = len(unit.tokens) >= GRAM_WORDS
            return
        for gram in grams_of(unit.tokens):
            if self._grams.setdefault(gram, position) != position:  # another unit has it already
                self._grams[gram] = _COMMON

    def _equal_unit(self, unit: _Unit, text: str) -> int | None:
        """The position of an indexed unit (held-out question or answer) that equals `unit` with its
        `text`, else None."""
        if (unit.part, text) in self._exact:
            return self._exact[unit.part, text]
        position = self._normalised.get((unit.part, " ".join(unit.tokens)))
        # The same words written differently are one unit only if their answers agree too: otherwise
        # case or punctuation is what the task is about.
        if position is None or not answers_agree(self.units[position].answer, unit.answer):
            return None
        return position

    def _units_sharing_grams(self, texts: Sequence[Sequence[str]]) -> list[int]:
        """Positions of the units (held-out texts) of which these texts contain a large part.

        A large part is a run of `COPIED_WORDS` words that only this unit has, or what
        `_is_large_part` defines. `texts` are lists of tokens.
        """
        if not self._grams:
            return []
        # Position of a unit -> what these texts have of it.
        shared_grams: dict[int, _SharedGrams] = {}
        for tokens in texts:
            self._collect_shared(tokens, shared_grams)
        numbers: set[str] = set().union(*(numbers_of(tokens) for tokens in texts))
        positions = []
        for position, shared in shared_grams.items():
            is_copied = shared.words_in_a_row >= COPIED_WORDS
            if is_copied or self._is_large_part(position, shared.grams, numbers):
                positions.append(position)
        return positions

    def _collect_shared(self, tokens: Sequence[str], shared_grams: dict[int, _SharedGrams]) -> None:
        """Add to `shared_grams` the word sequences of a text that exactly one unit (held-out text)
        has.

        `shared_grams` maps the position of a unit to what earlier texts share with it.
        """
        previous_position = _COMMON
        run = 0  # how many sequences in a row belong to the same unit
        for gram in grams_of(tokens):
            position = self._grams.get(gram, _COMMON)
            run = run + 1 if position == previous_position else 1
            previous_position = position
            if position == _COMMON:  # of several units, or of none
                continue
            shared = shared_grams.setdefault(position, _SharedGrams())
            shared.grams.add(gram)
            shared.longest_run = max(shared.longest_run, run)

    def _is_large_part(
        self, position: int, grams_in_row: set[tuple[str, ...]], numbers: set[str]
    ) -> bool:
        """Whether a row contains a large part of a unit (a held-out question or answer).

        The row must contain all numbers of the unit, `LARGE_SHARE` of the word sequences that no
        other unit has, and at least `FEWEST_GRAMS` of them.

        Args:
            position: of the unit, in `units`.
            grams_in_row: the word sequences of this unit alone that the row contains.
            numbers: all numbers that the row contains.
        """
        unit = self.units[position]
        fewest_grams = max(FEWEST_GRAMS, LARGE_SHARE * unit.unique_grams)
        has_all_numbers = numbers_of(unit.tokens) <= numbers
        return len(grams_in_row) >= fewest_grams and has_all_numbers


def scan(
    train: Sequence[Mapping[str, Any]],
    heldout: Sequence[Mapping[str, Any]],
    budget_s: float = BUDGET_S,
) -> dict[str, Any]:
    """Compare every training row with the held-out tasks.

    If `budget_s` seconds are not enough, a random part of the rows and of the tasks is compared,
    at least one of each. The same rows always give the same random order.

    Returns a JSON object:
        verdict: clean, overlap, or leak if more than 1 % of the held-out tasks are leaked.
        train, heldout: how many rows and tasks there are.
        exact, normalised, ngram: how many held-out tasks overlap, by their strongest match.
        answers: how many of these share nothing but the reference answer.
        leaked: ids of the tasks that the training rows teach (they ask them word for word).
        compared: [share of the training rows, share of the held-out tasks] that were compared;
            [1, 1] if there is nothing to compare.
        unindexed: how many of the compared tasks were not compared by word sequences, because the
            index was full.
        twins: how many further held-out tasks have a twin among the training rows, by kind of twin;
            {} where so few have one that it may be chance, or where time was up.
        examples: a few matches, the strongest first, and a few twins.
        headline: the result in a sentence.
    """
    deadline = time.monotonic() + budget_s
    compared = _compare_in_time(train, heldout, budget_s)
    matches = compared.matches
    counts = {kind: sum(match.kind == kind for match in matches) for kind in KINDS}
    leaked_ids = sorted(match.heldout for match in matches if match.spoils)
    twins = twin_scan.twins_in_time(
        _texts(train, others=heldout),
        _texts(heldout, others=train),
        heldout_count=len(heldout),
        copied={match.heldout for match in matches},
        deadline=deadline,
    )
    on_copies = headline(
        len(heldout),
        len(train),
        counts,
        matches,
        compared_shares=compared.shares,
        unindexed=compared.unindexed,
    )
    return {
        "verdict": _verdict_of_scan(len(matches) + len(twins), len(leaked_ids), len(heldout)),
        "train": len(train),
        "heldout": len(heldout),
        **counts,  # exact, normalised, ngram
        "answers": sum(match.part == "answer" for match in matches),
        "leaked": leaked_ids,
        "compared": list(compared.shares),
        "unindexed": compared.unindexed,
        "twins": twin_scan.counts_by_kind(twins),
        "examples": [
            *(match.to_json() for match in matches[:SHOWN]),
            *({"part": "prompt", **asdict(twin)} for twin in twins[:SHOWN]),
        ],
        "headline": on_copies + twin_scan.sentence(twins),
    }


def _texts(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> RowTexts:
    """Yield (id, question, answer) of rows, in the random order that `_random_rows` gives."""
    for row in _random_rows(rows, others=others):
        yield str(row.get("id")), question_of(row), answer_of(row)


def _verdict_of_scan(overlapping: int, leaked: int, heldout: int) -> str:
    """The verdict of a scan: clean, overlap or leak.

    `overlapping` and `leaked` count tasks; `heldout` is the number of all held-out tasks.
    """
    if not overlapping:
        return "clean"
    return "leak" if leaked > LEAK_SHARE * heldout else "overlap"


@dataclass(frozen=True)
class _Compared:
    """The result of a scan in the time that it had.

    Attributes:
        matches: the strongest match of each held-out task that overlaps, sorted by strength.
        shares: the share of the training rows, and that of the held-out tasks, that were compared.
        unindexed: how many tasks were not compared by word sequences.
    """

    matches: Sequence[Match]
    shares: tuple[float, float]
    unindexed: int


def _compare_in_time(
    train: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]], budget_s: float
) -> _Compared:
    """Compare as many training rows with as many held-out tasks as the time allows.

    Rows and tasks are taken in random order. `budget_s` is the time in seconds, half of it for
    indexing the tasks.
    """
    if not train or not heldout:  # nothing to compare, so everything was compared
        return _Compared(matches=[], shares=(1.0, 1.0), unindexed=0)
    started_at = time.monotonic()
    index_deadline, deadline = started_at + budget_s / 2, started_at + budget_s
    index = HeldOut(_random_rows(heldout, others=train), index_deadline)
    rows = _random_rows(train, others=heldout)
    matches, compared_rows = _strongest_matches(index, rows, deadline)
    matches.sort(key=lambda match: (match.rank, match.heldout))
    row_share = round(compared_rows / len(train), 4)
    task_share = round(index.tasks / len(heldout), 4)
    return _Compared(matches, shares=(row_share, task_share), unindexed=index.unindexed)


def _strongest_matches(
    index: HeldOut, rows: Iterable[Mapping[str, Any]], deadline: float
) -> tuple[list[Match], int]:
    """(the strongest match of each held-out task with any of the rows, how many rows were
    compared).

    After `deadline` (monotonic time) no further row is compared; the first row always is.
    """
    strongest: dict[str, Match] = {}
    compared_rows = 0
    for row in rows:
        for match in index.matches(row):
            _keep_stronger(strongest, match)
        compared_rows += 1
        if time.monotonic() > deadline:
            break
    return list(strongest.values()), compared_rows


def _keep_stronger(strongest: dict[str, Match], match: Match) -> None:
    """Store a match under its held-out task, unless the stored one is at least as strong."""
    earlier = strongest.get(match.heldout)
    if earlier is None or match.rank < earlier.rank:
        strongest[match.heldout] = match


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
    'h-7' with 't-12'". Tasks whose answer alone stands in the rows are counted separately: their
    questions were never trained on.

    Args:
        heldout, train: how many held-out tasks and training rows there are.
        counts: kind of match -> how many held-out tasks overlap in this way.
        matches: the strongest first; the first one is named as an example.
        compared_shares: the share of the rows, and that of the tasks, that were compared.
        unindexed: how many tasks were not compared by word sequences.
    """
    remark = _note_on_coverage(compared_shares, unindexed)
    total = sum(counts.values())
    if not total:
        return f"none of {heldout} held-out tasks repeats one of the {train} training rows{remark}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    strongest = matches[0]
    task_id, row_id = strongest.heldout[:ID_CHARS], strongest.train[:ID_CHARS]
    example = f"such as {task_id!r} with {row_id!r}{remark}"
    answer_alone = sum(match.part == "answer" for match in matches)
    if answer_alone == total:
        return (
            f"{total} of {heldout} held-out tasks have the reference answer of a training row to "
            f"another question ({kinds}), which is no leak where such answers repeat, {example}"
        )
    answer_note = f"{answer_alone} of them in the reference answer alone; " if answer_alone else ""
    return (
        f"{total} of {heldout} held-out tasks overlap with training rows ({answer_note}{kinds}), "
        f"{example}"
    )


def _note_on_coverage(compared_shares: tuple[float, float], unindexed: int) -> str:
    """A note in brackets on what was not fully compared; "" if everything was.

    `compared_shares` are those of the rows and of the tasks; `unindexed` is how many tasks were not
    compared by word sequences.
    """
    restrictions = []
    rows_share, tasks_share = compared_shares
    if rows_share < 1 or tasks_share < 1:
        restrictions.append(
            f"{whole_percent(rows_share)} of the rows and {whole_percent(tasks_share)} of the "
            "tasks were compared"
        )
    if unindexed:
        restrictions.append(
            f"{unindexed} tasks are past the {MOST_GRAMS:,} word sequences that are indexed and "
            "were compared as a whole only"
        )
    return f" ({'; '.join(restrictions)})" if restrictions else ""


def _random_rows(
    rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """At most MOST_COMPARED of `rows`, in random order: what is compared before the time is up is a
    fair sample of them.

    The order depends on the numbers of `rows` and `others` (what they are compared with) alone.
    """
    rng = random.Random(f"{len(rows)} {len(others)}")  # the text is the seed
    count = min(len(rows), MOST_COMPARED)
    indices = rng.sample(range(len(rows)), count)
    return (rows[index] for index in indices)
