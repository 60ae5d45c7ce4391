"""Training rows that are twins of held-out tasks: the same task in other words, with other numbers,
or with other names, which teach an exam without holding any of its texts.

- paraphrase: the same numbers and signs in the same order within other words, or so much of what
  few rows have (numbers, names, rare words, the answer) that no other row comes near;
- numbers: the same words and other numbers;
- template: the same words of grammar in the same order, around other names, things and numbers.

Rows of one generator are each other's twins by nature: `3 + 4` and `7 + 9` differ by their numbers
alone. So twins that are equal under a mask are named only where training rows and held-out tasks
pair otherwise than each of them pairs among itself, as rows drawn from one source would; and what
the rows of one form have in common tells nothing of a paraphrase.

Standard library and pure functions. Words of grammar are those of English; in other languages the
kind template is not looked for, and the two other ones work on numbers and rare words as they are.
"""

import heapq
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from engine.evidence.stats.words import tokens_of

TwinKind = Literal["paraphrase", "numbers", "template"]
TWIN_KINDS: tuple[TwinKind, ...] = ("paraphrase", "numbers", "template")  # the strongest first

FORM_ROWS, FORM_SHARE = 3, 0.6  # in this share of so many rows of one form a word is of the form
COMMON_SHARE = 0.3  # a word that more of the rows have tells nothing
STANDS_OUT = 6.0  # nats that a paraphrase shares beyond what the `BEHIND`th row does
CHANCE = 0.01  # that any training row shares so much with a task
BEHIND = 6  # so that five paraphrases of one task do not hide each other
LEAST_SHARED = 0.25  # of the weight of both texts, that a paraphrase shares
FEWEST_SIGNS = 3  # numbers, operators and telling words in order, that tell a text from others
FEWEST_WORDS = 6  # of a text, without its numbers, that is told from others by its words...
FEWEST_GRAMMAR = 8  # ...or by its words of grammar alone
# Rows of one source: at least this part of the pairs expected, and at most so many times as many,
# beside their chance.
FEWER, MORE = 3.0, 2.0
FEW_PAIRS = 5
SAME_NUMBERS = 0.75  # of the numbers of both texts, that a paraphrase shares
MOST_ROWS = 20_000  # of one side that are compared
MOST_POSTINGS = 3_000  # training rows behind one word that are looked at
_STEM_CHARS = 5  # "buy" and "buys", "apple" and "apples" are one word

_GRAMMAR = frozenset(
    (
        "a the this that these those some any each every all both no not more less fewer most "
        "least much many few other another same such one i you he she it we they me him her us "
        "them my your his its our their who whom whose which what when where why how is are was "
        "were be been being am do does did done has have had having can could will would shall "
        "should may might must of in on at by for with from to into onto over under between "
        "among after before during until than then there here as if so and or but because while "
        "also only just again up down out off per about left right now total"
    ).split()
)
_PRONOUNS = frozenset("he she him her his hers himself herself they them their".split())
_NUMBER_WORDS = frozenset(
    (
        "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
        "hundred thousand million"
    ).split()
)
_NUMBER = re.compile(r"[-+]?\d")
_ANY, _PERSON = "#", "he"


@dataclass(frozen=True)
class Text:
    """A question and its reference answer, "" where it has none; `row` is the id of its row."""

    row: str
    question: str
    answer: str = ""

    @cached_property
    def tokens(self) -> list[str]:
        """The words, numbers and operators of the question."""
        return tokens_of(self.question)

    @cached_property
    def answer_tokens(self) -> list[str]:
        """Those of the answer."""
        return tokens_of(self.answer)

    @cached_property
    def content(self) -> frozenset[str]:
        """What the task is about: numbers, stems of words that are not of grammar, the answer."""
        words = frozenset(_content(self.tokens))
        answer = " ".join(self.answer_tokens)
        if not answer or words.issuperset(_content(self.answer_tokens)):
            return words  # an answer that stands in the question tells nothing more
        return words | {f"= {answer}"}

    @cached_property
    def numbers(self) -> Counter[str]:
        """The numbers of the question, each as often as it stands there."""
        return Counter(token for token in self.tokens if _is_number(token))

    @cached_property
    def without_numbers(self) -> tuple[str, ...]:
        """The question with each number as a place."""
        return tuple(_ANY if _is_number(token) else token for token in self.tokens)

    @cached_property
    def grammar(self) -> tuple[str, ...]:
        """The words of grammar in their order, with a place for each row of numbers."""
        return tuple(_grammar(self.tokens))


@dataclass(frozen=True)
class Twin:
    """A training row that is a twin of a held-out task; both by the ids of their rows."""

    kind: TwinKind
    heldout: str
    train: str


@dataclass
class _Cluster:
    """Rows of both sides that are equal under a mask."""

    heldout: list[Text] = field(default_factory=list)
    train: list[Text] = field(default_factory=list)


def find_twins(
    train: Sequence[Text], heldout: Sequence[Text], deadline: float = math.inf
) -> list[Twin]:
    """One twin at most of each held-out task, of the strongest kind; in the order of the tasks.

    Training rows that ask a held-out task in its own words are no twins of any task: those are
    found as copies. After `deadline` (monotonic time) no further kind is looked for, nor a
    paraphrase of a further task.
    """
    heldout = heldout[:MOST_ROWS]
    asked = {tuple(text.tokens) for text in heldout}
    train = [row for row in train[:MOST_ROWS] if tuple(row.tokens) not in asked]
    found: dict[str, Twin] = {}
    weights = _Weights(train, heldout)
    kinds = (
        lambda: _masked("paraphrase", train, heldout, weights),
        lambda: _paraphrases(train, heldout, weights, deadline),
        lambda: _masked("numbers", train, heldout, weights),
        lambda: _masked("template", train, heldout, weights),
    )
    for twins_of_kind in kinds:
        if time.monotonic() > deadline:
            break
        for twin in twins_of_kind():
            found.setdefault(twin.heldout, twin)
    return [found[text.row] for text in heldout if text.row in found]


# --- by a mask ------------------------------------------------------------------------------------


def _masked(
    kind: TwinKind, train: Sequence[Text], heldout: Sequence[Text], weights: "_Weights"
) -> Iterator[Twin]:
    """The twins that are equal where a kind's mask hides the rest: all but the signs for a
    paraphrase, numbers, or all but the grammar.

    None where the two sides pair as rows of one source do.
    """
    clusters: dict[tuple[str, ...], _Cluster] = defaultdict(_Cluster)
    for side, texts in (("heldout", heldout), ("train", train)):
        for text in texts:
            mask = _mask(kind, text, weights)
            if mask:
                getattr(clusters[mask], side).append(text)
    if _is_by_nature(clusters.values(), len(train), len(heldout)):
        return
    for cluster in clusters.values():
        for text in cluster.heldout:
            other = next((row for row in cluster.train if _may_be_twins(kind, text, row)), None)
            if other is not None:
                yield Twin(kind, text.row, other.row)


def _mask(kind: TwinKind, text: Text, weights: "_Weights") -> tuple[str, ...]:
    """What of a text must be equal in a twin of this kind; () where it is too little."""
    if kind == "paraphrase":
        payload = weights.payload(text)
        return payload if len(payload) >= FEWEST_SIGNS else ()
    mask, fewest = (
        (text.without_numbers, FEWEST_WORDS)
        if kind == "numbers"
        else (text.grammar, FEWEST_GRAMMAR)
    )
    return mask if sum(part != _ANY for part in mask) >= fewest else ()


def _may_be_twins(kind: TwinKind, text: Text, row: Text) -> bool:
    """Whether rows that are equal under the mask of a kind are twins."""
    return kind != "paraphrase" or _may_be_paraphrases(text, row)


def _is_by_nature(clusters: Iterable[_Cluster], train: int, heldout: int) -> bool:
    """Whether training rows are equal to held-out tasks about as often as rows of one source are.

    How often those are is seen within the held-out tasks, and within the training rows that are
    equal to none of these. `train` and `heldout` are how many there are of each.
    """
    across = of_tasks = of_rows = 0  # pairs of equal rows
    rows_apart = 0  # training rows that are equal to no held-out task
    for cluster in clusters:
        tasks, rows = len(cluster.heldout), len(cluster.train)
        across += tasks * rows
        of_tasks += tasks * (tasks - 1) // 2
        if not tasks:
            rows_apart += rows
            of_rows += rows * (rows - 1) // 2
    pairs, equal = heldout * (heldout - 1) // 2, of_tasks
    if of_tasks < FEW_PAIRS:  # too few to know how often such pairs come
        pairs, equal = pairs + rows_apart * (rows_apart - 1) // 2, of_tasks + of_rows
    if not across or not pairs:
        return not across
    expected = equal / pairs * train * heldout
    return expected / FEWER <= across <= expected * MORE + 3 * math.sqrt(expected)


# --- by content -----------------------------------------------------------------------------------


def _paraphrases(
    train: Sequence[Text], heldout: Sequence[Text], weights: "_Weights", deadline: float
) -> Iterator[Twin]:
    """The twins that share much more of what few rows have than other rows do."""
    rows_of_word: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(train):
        for word in weights.telling(row):
            rows_of_word[word].append(place)
    # A row shares words of this weight with a task by chance, where words come independently.
    least_of_all = math.log(len(train) / CHANCE) if train else 0.0
    for number, text in enumerate(heldout):
        if number % 20 == 0 and time.monotonic() > deadline:
            return
        shared: dict[int, float] = defaultdict(float)
        for word in weights.telling(text):
            places = rows_of_word.get(word, ())
            if len(places) <= MOST_POSTINGS:
                for place in places:
                    shared[place] += weights.of(word)
        if not shared:
            continue
        best = heapq.nlargest(BEHIND, shared.items(), key=lambda item: item[1])
        behind = best[-1][1] if len(best) == BEHIND else 0.0
        for place, weight in best:
            row = train[place]
            all_of_both = weights.sum(weights.telling(text) | weights.telling(row))
            least = max(least_of_all, behind + STANDS_OUT, LEAST_SHARED * all_of_both)
            if weight >= least and _may_be_paraphrases(text, row):
                yield Twin("paraphrase", text.row, row.row)
                break


class _Weights:
    """How much each word tells, in nats, by how many of all rows have it."""

    def __init__(self, train: Sequence[Text], heldout: Sequence[Text]) -> None:
        texts = [*train, *heldout]
        self._rows = len(texts)
        self._rows_of_word = Counter(word for text in texts for word in text.content)
        self._most = max(1, COMMON_SHARE * self._rows)
        # A form is what the rows of one template have in common.
        sizes = Counter(text.grammar for text in texts)
        in_form = Counter((text.grammar, word) for text in texts for word in text.content)
        self._form = {
            (form, word)
            for (form, word), count in in_form.items()
            if sizes[form] >= FORM_ROWS and count >= FORM_SHARE * sizes[form]
        }
        self._telling: dict[str, frozenset[str]] = {}
        self._of_tasks = frozenset().union(*(self.telling(text) for text in heldout))

    def telling(self, text: Text) -> frozenset[str]:
        """What of a text's content is neither of its form nor in very many rows."""
        if text.row not in self._telling:
            self._telling[text.row] = frozenset(
                word
                for word in text.content
                if (text.grammar, word) not in self._form and self._rows_of_word[word] <= self._most
            )
        return self._telling[text.row]

    def payload(self, text: Text) -> tuple[str, ...]:
        """Numbers, operators and the telling words of held-out tasks, in the order of the text."""
        return tuple(
            word
            for word in map(_stem, text.tokens)
            if _is_sign(word) or (word in self._of_tasks and word in self.telling(text))
        )

    def of(self, word: str) -> float:
        """The weight of a word."""
        return math.log(self._rows / self._rows_of_word[word])

    def sum(self, words: Iterable[str]) -> float:
        """The weight of words together."""
        return math.fsum(self.of(word) for word in words)


def _may_be_paraphrases(text: Text, row: Text) -> bool:
    """Whether neither numbers nor answers speak against it."""
    both, either = (text.numbers & row.numbers).total(), (text.numbers | row.numbers).total()
    same_numbers = both >= SAME_NUMBERS * either
    return same_numbers and _answers_fit(text, row)


def _answers_fit(text: Text, row: Text) -> bool:
    """Whether the answers may be to one question: equal, or one of them not known."""
    ours, theirs = text.answer_tokens, row.answer_tokens
    if not ours or not theirs:
        return True
    shorter, longer = sorted((ours, theirs), key=len)
    return set(shorter) <= set(longer)


def _content(tokens: Iterable[str]) -> Iterator[str]:
    for token in tokens:
        if _is_number(token):
            yield token
        elif token not in _GRAMMAR and token not in _PRONOUNS:
            yield _stem(token)


def _stem(token: str) -> str:
    return token[:_STEM_CHARS] if token.isalpha() and not _is_number(token) else token


def _grammar(tokens: Iterable[str]) -> Iterator[str]:
    last = ""
    for token in tokens:
        if _is_number(token):
            part = _ANY
        elif token in _PRONOUNS:
            part = _PERSON
        elif token in _GRAMMAR:
            part = token
        else:
            continue
        if part != _ANY or last != _ANY:
            yield part
        last = part


def _is_number(token: str) -> bool:
    return token[0].isdigit() or token in _NUMBER_WORDS


def _is_sign(token: str) -> bool:
    """Whether a token is a number, or an operator or bracket."""
    return _is_number(token) or not token[0].isalnum()
