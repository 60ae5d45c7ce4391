"""A hint that related rows stand both in training and in the held-out tasks, without a common
`group`.

Two kinds of related rows are recognised: prompts of the same words in another order (3 + 4 and 4 +
3), and one noun, name or term in many templates. A model that was trained on one such row can guess
the other, which flatters it on the held-out tasks (the exam). Only the author knows which rows
belong together, so this is only a hint: no row is moved.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.format import counted, percent
from engine.evidence.overlap.words import tokens_of

_MOST_ROWS = 20_000  # of both sides together; more are not compared, for the time that it takes
_FEWEST_EXAM = 10  # rows of the exam (held-out tasks); fewer show nothing
_REORDERED = 0.05  # share of the exam's prompts that must be reordered for a hint
_FEWEST_REORDERED = 3
_COMMON = 0.1  # a word in more than this share of the rows belongs to a template
_ROWS_OF_A_TERM = 5  # rows with the same term must be this many, on average, for a hint
_COVERED = 0.5  # share of the exam's rows whose term stands in training rows, for a hint
_SHOWN_CHARS = 80  # of a prompt that is an example
_GROUP_CHARS = 40  # of the name of a group of rows
_CURE = (
    'give such rows one `group` (Task(..., group="{group}"), or a key "group" in a data row), '
    "which is never on two sides"
)


def family_hint(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence that names related rows on both sides of the split with an example, as a list of
    one.

    Returns [] if none are seen, if rows have groups already, and if there are too many rows.

    Args:
        rows: stored task rows with "prompt" (messages), "split" and optionally "group".
    """
    exam = [row for row in rows if row["split"] != "train"]  # the held-out rows
    train = [row for row in rows if row["split"] == "train"]
    if len(rows) > _MOST_ROWS or len(exam) < _FEWEST_EXAM or not train:
        return []
    has_groups = any(row.get("group") for row in rows)
    if has_groups:
        return []
    return _hint_on_reordered_prompts(train, exam) or _hint_on_shared_terms(train, exam)


def _hint_on_reordered_prompts(
    train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The hint that prompts of the exam (the held-out rows) have the words of training prompts in
    another order, as a list of one.

    `train` and `exam` are the training rows and the held-out rows. Returns [] if such prompts are
    fewer than `_FEWEST_REORDERED`, or less than the share `_REORDERED` of the exam.
    """
    pairs = _pairs_of_same_words(train, exam)
    if len(pairs) < _FEWEST_REORDERED or len(pairs) < _REORDERED * len(exam):
        return []
    exam_text, train_text = pairs[0]  # the example
    share = percent(len(pairs) / len(exam), digits=0)
    return [
        f"{len(pairs)} of {counted(len(exam), 'held-out row')} ({share}) have the words of a "
        f"training row in another order, such as {_quoted(exam_text)} and {_quoted(train_text)}: "
        + _CURE.format(group=_moved_words(exam_text, train_text))
    ]


def _pairs_of_same_words(
    train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Pairs (held-out prompt, training prompt) with the same words in another order; at most one
    pair for each held-out row."""
    train_text_by_words: dict[tuple[str, ...], str] = {}  # sorted words -> the first such prompt
    for row in train:
        text = _text(row)
        sorted_words = tuple(sorted(tokens_of(text)))
        train_text_by_words.setdefault(sorted_words, text)
    pairs = []
    for row in exam:
        text = _text(row)
        words = tokens_of(text)
        train_text = train_text_by_words.get(tuple(sorted(words)))
        if train_text is None or len(words) < 2:
            continue
        if tokens_of(train_text) != words:  # the order differs
            pairs.append((text, train_text))
    return pairs


def _moved_words(text: str, other_text: str) -> str:
    """The words of `text` that stand in another place in `other_text`, joined as the name of a
    group.

    Both texts must have the same words: "3 + 4" and "4 + 3" give "3 4".
    """
    words = zip(tokens_of(text), tokens_of(other_text), strict=True)
    moved = sorted(word for word, other_word in words if word != other_word)
    return " ".join(moved)[:_GROUP_CHARS]


def _hint_on_shared_terms(
    train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The hint that held-out rows ask about the terms of training rows, as a list of one.

    A term is the set of those words of a prompt that few prompts have. Returns [] if terms do not
    repeat, or if less than the share `_COVERED` of the held-out rows (`exam`) have a term of a
    training row.
    """
    terms = _terms([*train, *exam])
    if not _terms_repeat(terms):
        return []
    train_terms, exam_terms = set(terms[: len(train)]), terms[len(train) :]
    shared_terms = [term for term in exam_terms if term and term in train_terms]
    if len(shared_terms) < _COVERED * len(exam):
        return []
    example, _ = Counter(shared_terms).most_common(1)[0]  # the term of most rows
    name = " ".join(sorted(example))[:_GROUP_CHARS]
    share = percent(len(shared_terms) / len(exam), digits=0)
    return [
        f"{len(shared_terms)} of {counted(len(exam), 'held-out row')} ({share}) ask about a term "
        f"of training rows, such as {name!r} in {counted(terms.count(example), 'row')} of both "
        "sides: " + _CURE.format(group=name)
    ]


def _terms_repeat(terms: Sequence[frozenset[str]]) -> bool:
    """Whether the terms repeat: on average at least `_ROWS_OF_A_TERM` rows have the same term.

    `terms` holds one term for each row; empty ones do not count.
    """
    terms_with_words = [term for term in terms if term]
    different_terms = set(terms_with_words)
    enough_rows = len(terms_with_words) >= _ROWS_OF_A_TERM * len(different_terms)
    return bool(terms_with_words) and enough_rows


def _terms(rows: Sequence[Mapping[str, Any]]) -> list[frozenset[str]]:
    """The term of each row: the words of its prompt that at most the share `_COMMON` of all prompts
    have. It is empty if all words of the prompt are more common."""
    words_of_rows = [_words(_text(row)) for row in rows]
    row_counts: Counter[str] = Counter()  # word -> how many rows have it
    for words in words_of_rows:
        row_counts.update(words)
    most_rows = _COMMON * len(rows)
    rare_words = {word for word, count in row_counts.items() if count <= most_rows}
    return [words & rare_words for words in words_of_rows]


def _words(text: str) -> frozenset[str]:
    """The different words of a text: only letters, at least two."""
    return frozenset(token for token in tokens_of(text) if token.isalpha() and len(token) > 1)


def _text(row: Mapping[str, Any]) -> str:
    """The text of the last message of a row's prompt, which holds the question; "" if there is
    none."""
    prompt = row["prompt"]
    content = prompt[-1].get("content") if prompt else ""
    return content if isinstance(content, str) else ""


def _quoted(text: str) -> str:
    """A prompt in quotes on one line, shortened to `_SHOWN_CHARS`."""
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= _SHOWN_CHARS else f'"{line[:_SHOWN_CHARS]}…"'
