"""Training rows that are twins of held-out tasks: the same task in other words, with other numbers,
or with other names, which teach an exam without holding any of its texts.

- paraphrase: the same numbers and signs in the same order within other words, or so much of what
  few rows have (numbers, names, rare words, the answer) that no other row comes near;
- numbers: the same words and other numbers;
- template: the same words of grammar in the same order, around other names, things and numbers, or
  all words the same around other rows of numbers and operators, or the same beginning.

Rows of one generator are each other's twins by nature: `3 + 4` and `7 + 9` differ by their numbers
alone. So twins that are equal under a mask are named only where training rows and held-out tasks
pair otherwise than each of them pairs among itself, as rows drawn from one source would; and what
the rows of one form have in common tells nothing of a paraphrase.

Standard library and pure functions. Words of grammar are those of English. In other languages the
kind template is not looked for; the other two kinds work on numbers and rare words as they are.
"""

import heapq
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.evidence.overlap.twin_texts import ANY_NUMBER, Text, is_code, is_letter, is_sign, stem

TwinKind = Literal["paraphrase", "numbers", "template"]
# What texts may have in common; a twin by "frame" or "opening" is of the kind "template".
MaskKind = Literal["paraphrase", "numbers", "template", "frame", "opening"]
TWIN_KINDS: tuple[TwinKind, ...] = ("paraphrase", "numbers", "template")  # the strongest first

FORM_ROWS, FORM_SHARE = 3, 0.6  # in this share of so many rows of one form a word is of the form
PAYLOAD_FORM_ROWS = 8  # rows of a form, from which on its words are left out of every payload
COMMON_SHARE = 0.3  # a word that more of the rows have tells nothing
STANDS_OUT = 6.0  # nats that a paraphrase shares beyond what the `BEHIND`th row does
CHANCE = 0.01  # that any training row shares so much with a task
BEHIND = 6  # so that five paraphrases of one task do not hide each other
LEAST_SHARED = 0.25  # of the weight of both texts, that a paraphrase shares
# Numbers, operators and telling words in order, that tell a text from others. The answer counts as
# one of them where one is missing: "76, 38" with the answer 76 is the same task in any words.
# A long code such as "dabbaceedbbca" is enough by itself.
FEWEST_SIGNS = 3
LONG_CODE = 12  # letters
FEWEST_ANSWER_WORDS = 3  # of an answer that is told from others by its words
MOST_SAME_ANSWERS = 5  # training rows with an answer that is rare
FEWEST_WORDS = 6  # of a text, without its numbers, that is told from others by its words...
FEWEST_GRAMMAR = 8  # ...or by its words of grammar alone
OPENING = 8  # first words of a text that is told from others by them
# Rows of one source: at least this part of the pairs expected, and at most so many times as many,
# beside their chance.
FEWER, MORE = 3.0, 2.0
FEW_PAIRS = 5
_LOWER = re.compile(r"\b[a-z]+\b")
SAME_SYMBOLS = 0.75  # of the numbers and single letters of both texts, that a paraphrase shares
MOST_ROWS = 20_000  # of one side that are compared
MOST_POSTINGS = 3_000  # training rows behind one word that are looked at


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
    """Return at most one twin of each held-out task, in the order of the tasks. A twin is a
    training row that asks the task in other words, or with other numbers or names.

    A task with twins of several kinds gets one of the strongest kind. Training rows that ask a
    held-out task in its own words are left out: overlap.py finds them as copies. After `deadline`
    (seconds of the monotonic clock) no further kind is looked for, and no paraphrase of a further
    task.
    """
    heldout = heldout[:MOST_ROWS]
    heldout_texts = {tuple(text.tokens) for text in heldout}
    train = [row for row in train[:MOST_ROWS] if tuple(row.tokens) not in heldout_texts]
    twin_of_task: dict[str, Twin] = {}
    weights = _Weights(train, heldout)
    searches = (  # of the strongest kind first; each runs only if there is time left
        lambda: _twins_by_mask("paraphrase", train, heldout, weights),
        lambda: _paraphrases_by_answer(train, heldout, weights, deadline),
        lambda: _paraphrases(train, heldout, weights, deadline),
        lambda: _twins_by_mask("numbers", train, heldout, weights),
        lambda: _twins_by_mask("template", train, heldout, weights),
        lambda: _twins_by_mask("frame", train, heldout, weights),
        lambda: _twins_by_mask("opening", train, heldout, weights),
    )
    for search in searches:
        if time.monotonic() > deadline:
            break
        for twin in search():
            twin_of_task.setdefault(twin.heldout, twin)
    return [twin_of_task[text.row] for text in heldout if text.row in twin_of_task]


# --- by a mask ------------------------------------------------------------------------------------


def _twins_by_mask(
    mask_kind: MaskKind, train: Sequence[Text], heldout: Sequence[Text], weights: "_Weights"
) -> Iterator[Twin]:
    """Yield the pairs of held-out task and training row that have equal masks of a kind. A mask is
    the part of a text that twins of the kind share (see `_mask`).

    Yields nothing if tasks and rows pair as often as rows of one source do.
    """
    cluster_of_mask: dict[tuple[str, ...], _Cluster] = defaultdict(_Cluster)
    for text in heldout:
        mask = _mask(mask_kind, text, weights)
        if mask:
            cluster_of_mask[mask].heldout.append(text)
    for row in train:
        mask = _mask(mask_kind, row, weights)
        if mask:
            cluster_of_mask[mask].train.append(row)
    clusters = cluster_of_mask.values()
    if _pair_as_of_one_source(clusters, len(train), len(heldout)):
        return
    kind: TwinKind = "template" if mask_kind in ("frame", "opening") else mask_kind
    for cluster in clusters:
        for text in cluster.heldout:
            twins = (row for row in cluster.train if _may_be_twins(kind, text, row, weights))
            first_twin = next(twins, None)
            if first_twin is not None:
                yield Twin(kind, heldout=text.row, train=first_twin.row)


def _mask(kind: MaskKind, text: Text, weights: "_Weights") -> tuple[str, ...]:
    """Return the part of a text that must be equal in a twin of this kind.

    That is: for a paraphrase its numbers, operators and telling words (with its answer if they are
    few), for `numbers` all but its numbers, for `template` its words of grammar, for `frame` all
    words around its numbers and operators, for `opening` its first words. Returns () if that part
    is too short to tell one text from another.
    """
    if kind == "paraphrase":
        payload = weights.payload(text)
        is_one_short = len(payload) == FEWEST_SIGNS - 1
        if is_one_short and text.answer_tokens:  # the answer counts as one part
            payload = (*payload, " ".join(text.answer_tokens))
        is_long = len(payload) >= FEWEST_SIGNS or any(_is_long_code(part) for part in payload)
        return payload if is_long else ()
    if kind == "numbers":
        return text.without_numbers if _word_count(text.without_numbers) >= FEWEST_WORDS else ()
    if kind == "template":
        return text.grammar if _word_count(text.grammar) >= FEWEST_GRAMMAR else ()
    if kind == "opening":
        opening = text.without_numbers[:-1][:OPENING]  # of a short text all but the last word
        return opening if _word_count(opening) >= FEWEST_WORDS else ()
    # A frame may be short if there is more in it: "Calculate 3 * 4".
    word_count = _word_count(text.around_signs)
    is_told_by_signs = 0 < word_count < len(text.tokens) / 2
    return text.around_signs if is_told_by_signs or word_count >= FEWEST_WORDS else ()


def _word_count(mask: Sequence[str]) -> int:
    """Return how many parts of a mask are words, not numbers or operators."""
    return sum(part != ANY_NUMBER and not is_sign(part) for part in mask)


def _is_long_code(part: str) -> bool:
    """Return whether a part of a payload is a code so long that chance does not draw it twice."""
    return len(part) >= LONG_CODE and is_code(part)


def _may_be_twins(kind: TwinKind, text: Text, row: Text, weights: "_Weights") -> bool:
    """Return whether a task and a row with equal masks of this kind are twins. Only paraphrases
    have further conditions."""
    return kind != "paraphrase" or weights.may_be_paraphrases(text, row)


def _pair_as_of_one_source(clusters: Iterable[_Cluster], train: int, heldout: int) -> bool:
    """Return whether rows pair with held-out tasks about as often as rows of one source would.

    A pair is two texts with the same mask. How often texts of one source pair is measured among the
    held-out tasks and, if they give too few pairs, also among the training rows that pair with no
    task.

    Args:
        clusters: the texts with the same mask, for every mask.
        train, heldout: how many training rows and held-out tasks there are.
    """
    cross_pairs = task_pairs = row_pairs = 0  # pairs of equal rows
    unpaired_rows = 0  # training rows that are equal to no held-out task
    for cluster in clusters:
        tasks, rows = len(cluster.heldout), len(cluster.train)
        cross_pairs += tasks * rows
        task_pairs += tasks * (tasks - 1) // 2
        if not tasks:
            unpaired_rows += rows
            row_pairs += rows * (rows - 1) // 2
    possible_pairs, equal_pairs = heldout * (heldout - 1) // 2, task_pairs
    if task_pairs < FEW_PAIRS:  # too few to know how often such pairs come
        possible_pairs += unpaired_rows * (unpaired_rows - 1) // 2
        equal_pairs += row_pairs
    if not cross_pairs:
        return True
    if not possible_pairs:
        return False
    expected_pairs = equal_pairs / possible_pairs * train * heldout
    # Three standard deviations of a Poisson number are left to chance.
    most_pairs = expected_pairs * MORE + 3 * math.sqrt(expected_pairs)
    return expected_pairs / FEWER <= cross_pairs <= most_pairs


# --- by content -----------------------------------------------------------------------------------


def _paraphrases(
    train: Sequence[Text], heldout: Sequence[Text], weights: "_Weights", deadline: float
) -> Iterator[Twin]:
    """Yield the pairs of task and row that share far more rare words than the task shares with
    other rows; at most one pair for each task. The search ends at `deadline` (monotonic clock)."""
    rows_with_word: dict[str, list[int]] = defaultdict(list)  # word -> indices of rows
    for row_index, row in enumerate(train):
        for word in weights.telling_words(row):
            rows_with_word[word].append(row_index)
    # A row shares words of this weight with a task by chance, where words come independently.
    least_by_chance = math.log(len(train) / CHANCE) if train else 0.0
    for task_index, text in enumerate(heldout):
        if task_index % 20 == 0 and time.monotonic() > deadline:
            return
        nearest_rows = _nearest_rows(text, rows_with_word, weights)
        if not nearest_rows:
            continue
        _, weight_of_last = nearest_rows[-1]
        if len(nearest_rows) < BEHIND:  # no row is left to stand out from
            weight_of_last = 0.0
        for row_index, shared_weight in nearest_rows:
            row = train[row_index]
            words_of_both = weights.telling_words(text) | weights.telling_words(row)
            weight_of_both = weights.sum_of(words_of_both)
            least_weight = max(
                least_by_chance, weight_of_last + STANDS_OUT, LEAST_SHARED * weight_of_both
            )
            if shared_weight >= least_weight and weights.may_be_paraphrases(text, row):
                yield Twin("paraphrase", heldout=text.row, train=row.row)
                break


def _nearest_rows(
    text: Text, rows_with_word: Mapping[str, Sequence[int]], weights: "_Weights"
) -> list[tuple[int, float]]:
    """Return the rows that share most with a task, at most `BEHIND`, as (index of the row, weight
    of the telling words that it shares), the largest weight first.

    `rows_with_word` maps a word to the indices of the rows that have it; very frequent words are
    left out, to bound the time.
    """
    shared_weights: dict[int, float] = defaultdict(float)
    for word in weights.telling_words(text):
        row_indices = rows_with_word.get(word, ())
        if len(row_indices) <= MOST_POSTINGS:
            for row_index in row_indices:
                shared_weights[row_index] += weights.weight_of(word)
    return heapq.nlargest(BEHIND, shared_weights.items(), key=lambda item: item[1])


def _paraphrases_by_answer(
    train: Sequence[Text], heldout: Sequence[Text], weights: "_Weights", deadline: float
) -> Iterator[Twin]:
    """Yield the pairs of task and row that have the same rare answer and are about its words.

    For example "Reverse these words: a, and, life" and "Flip this series: a, and, life", with the
    answer "life, and, a": every other row may have such words too, but not in this order.
    """
    rows_by_answer: dict[tuple[str, ...], list[Text]] = defaultdict(list)
    for row in train:
        if len(row.answer_tokens) >= FEWEST_ANSWER_WORDS:
            rows_by_answer[tuple(row.answer_tokens)].append(row)
    task_counts = Counter(tuple(text.answer_tokens) for text in heldout)
    for text in heldout:
        answer = tuple(text.answer_tokens)
        rows = rows_by_answer.get(answer, [])
        # An answer that others have too, such as a label, says nothing of the question.
        if not rows or task_counts[answer] > 1 or len(rows) > MOST_SAME_ANSWERS:
            continue
        if time.monotonic() > deadline:
            return
        for row in rows:
            if _asks_about_same_words(text, row, weights):
                yield Twin("paraphrase", text.row, row.row)
                break


def _asks_about_same_words(text: Text, row: Text, weights: "_Weights") -> bool:
    """Return whether two questions with one answer have its words, and what else tells them from
    others, in the same order."""
    if not _is_about_its_answer(text) or not _is_about_its_answer(row):
        return False
    if _answer_words_in_order(text) != _answer_words_in_order(row):
        return False
    shorter, longer = sorted((weights.payload(text), weights.payload(row)), key=len)
    return _comes_in_order(shorter, longer) and weights.may_be_paraphrases(text, row)


def _is_about_its_answer(text: Text) -> bool:
    """Return whether all words of the answer stand in the question."""
    return set(text.answer_tokens) <= set(text.tokens)


def _answer_words_in_order(text: Text) -> list[str]:
    """Return the last words of the question that are words of the answer, as many as it has."""
    answer = set(text.answer_tokens)
    return [token for token in text.tokens if token in answer][-len(text.answer_tokens) :]


def _comes_in_order(shorter: Sequence[str], longer: Sequence[str]) -> bool:
    """Return whether all parts of a payload come in another one, in the same order."""
    parts = iter(longer)
    return all(part in parts for part in shorter)


class _Weights:
    """How much each word tells, in nats, by how many of all rows have it."""

    def __init__(self, train: Sequence[Text], heldout: Sequence[Text]) -> None:
        """Count the words of all rows, and find those that are part of a form (template)."""
        texts = [*train, *heldout]
        self._row_total = len(texts)
        self._row_counts = Counter(word for text in texts for word in text.content)
        self._most_rows = max(1, COMMON_SHARE * self._row_total)
        # A form is what the rows of one template have in common.
        rows_of_form = Counter(text.grammar for text in texts)
        rows_of_form_and_word = Counter(
            (text.grammar, word) for text in texts for word in text.content
        )
        self._words_of_form = {
            (form, word)
            for (form, word), count in rows_of_form_and_word.items()
            if rows_of_form[form] >= FORM_ROWS and count >= FORM_SHARE * rows_of_form[form]
        }
        self._names = _proper_nouns(train, heldout)
        # By text and not by its id, which a row of another environment may have too.
        self._telling_words: dict[Text, frozenset[str]] = {}
        # Of a payload, by which two texts are compared: the same words for every text, whatever its
        # form, so that a paraphrase, which is of another form, keeps them too.
        words_of_any_form = {
            word for form, word in self._words_of_form if rows_of_form[form] >= PAYLOAD_FORM_ROWS
        }
        self._payload_words = (
            frozenset().union(*(self.telling_words(text) for text in heldout)) - words_of_any_form
        )

    def telling_words(self, text: Text) -> frozenset[str]:
        """Return the words that tell a text from others: neither part of its form (what the rows of
        one template have in common) nor in very many rows. They are computed once for each row."""
        if text not in self._telling_words:
            self._telling_words[text] = frozenset(
                word
                for word in text.content
                if (text.grammar, word) not in self._words_of_form
                and self._row_counts[word] <= self._most_rows
            )
        return self._telling_words[text]

    def payload(self, text: Text) -> tuple[str, ...]:
        """Return in order a text's numbers, operators and words that tell held-out tasks apart."""
        return tuple(
            stem(token)
            for token in text.tokens
            if is_sign(token)
            or is_letter(token)
            or token in self._names
            or stem(token) in self._payload_words
        )

    def may_be_paraphrases(self, text: Text, row: Text) -> bool:
        """Return whether a row may ask a task in other words: most of their symbols (numbers,
        single letters and proper nouns) are the same, and their answers fit."""
        names = self._names.intersection(text.tokens)  # other words may have others
        of_text, of_row = text.symbols(names), row.symbols(names)
        # `&` and `|` of two counters take the smaller and the larger count of each symbol.
        in_both, in_either = (of_text & of_row).total(), (of_text | of_row).total()
        return in_both >= SAME_SYMBOLS * in_either and _answers_fit(text, row)

    def weight_of(self, word: str) -> float:
        """Return the weight of a word in nats: log(rows / rows that have it)."""
        return math.log(self._row_total / self._row_counts[word])

    def sum_of(self, words: Iterable[str]) -> float:
        """Return the sum of the weights of the words, in nats."""
        return math.fsum(self.weight_of(word) for word in words)


def _proper_nouns(train: Iterable[Text], heldout: Sequence[Text]) -> frozenset[str]:
    """Return the words, in lower case, that stand inside sentences of held-out tasks with a capital
    letter and nowhere without one, such as months and the names of people; but not those of so many
    tasks that they name nothing, such as True and False where all tasks have them."""
    capitals, others, row_counts = set[str](), set[str](), Counter[str]()
    for text in heldout:
        capitals |= text.capitals
        row_counts.update(set(text.tokens))
    for text in (*train, *heldout):
        others.update(_LOWER.findall(text.question))
    most_rows = FORM_SHARE * len(heldout)
    return frozenset(word for word in capitals - others if row_counts[word] < most_rows)


def _answers_fit(text: Text, row: Text) -> bool:
    """Return whether two answers may be to one question: one holds the other, or one is unknown."""
    task_answer, row_answer = text.answer_tokens, row.answer_tokens
    if not task_answer or not row_answer:
        return True
    shorter, longer = sorted((task_answer, row_answer), key=len)
    return set(shorter) <= set(longer)
