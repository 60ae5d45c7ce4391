"""Rows that are likely of one family and stand on both sides of the split without a `group`.

Two kinds are seen: prompts of the same words in another order (3 + 4 and 4 + 3), and one noun, name
or term in many templates. Such rows give each other away, so that an exam flatters the model; only
the author knows which of them belong together, so this is a hint and moves nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.format import counted, percent
from engine.evidence.stats.words import tokens_of

_MOST_ROWS = 20_000  # of both sides together; more are not looked at
_FEWEST_EXAM = 10  # rows of the exam; fewer show nothing
_REORDERED = 0.05  # share of the exam from which reordered prompts are worth a word
_FEWEST_REORDERED = 3
_COMMON = 0.1  # a word in more than this share of the rows belongs to a template
_ROWS_OF_A_TERM = 5  # on average, from which on rows of one term are a family
_COVERED = 0.5  # share of the exam whose term stands in training rows too
_SHOWN_CHARS = 80  # of a prompt that is an example
_CURE = (
    'give such rows one `group` (Task(..., group="{group}"), or a key "group" in a data row), '
    "which is never on two sides"
)


def family_hint(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence that names likely families on both sides of the split with an example, as a list;
    [] where none are seen, where rows have groups already, and where there are too many rows.

    Args:
        rows: stored task rows with "prompt" (messages), "split" and, where they have one, "group".
    """
    exam = [row for row in rows if row["split"] != "train"]
    train = [row for row in rows if row["split"] == "train"]
    if len(rows) > _MOST_ROWS or len(exam) < _FEWEST_EXAM or not train:
        return []
    if any(row.get("group") for row in rows):
        return []
    return _reordered(train, exam) or _one_term(train, exam)


def _reordered(train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hint that prompts of the exam are training prompts in another order."""
    by_words: dict[tuple[str, ...], str] = {}
    for row in train:
        text = _text(row)
        by_words.setdefault(tuple(sorted(tokens_of(text))), text)
    pairs = []
    for row in exam:
        text = _text(row)
        tokens = tokens_of(text)
        other = by_words.get(tuple(sorted(tokens)))
        if other is not None and len(tokens) > 1 and tokens_of(other) != tokens:
            pairs.append((text, other))
    if len(pairs) < max(_FEWEST_REORDERED, _REORDERED * len(exam)):
        return []
    asked, taught = pairs[0]
    tokens, others = tokens_of(asked), tokens_of(taught)
    moved = [one for one, other in zip(tokens, others, strict=True) if one != other]
    group = " ".join(sorted(moved))[:40]
    return [
        f"{len(pairs)} of {counted(len(exam), 'held-out row')} "
        f"({percent(len(pairs) / len(exam), digits=0)}) have the words of a training row in "
        f"another order, such as {_shown(asked)} and {_shown(taught)}: " + _CURE.format(group=group)
    ]


def _one_term(train: Sequence[Mapping[str, Any]], exam: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hint that the terms of the exam, each in many rows, are those of training rows."""
    all_words = [_words(_text(row)) for row in (*train, *exam)]
    spread = Counter(word for words in all_words for word in words)
    most = _COMMON * len(all_words)
    terms = [frozenset(word for word in words if spread[word] <= most) for words in all_words]
    of_train, of_exam = terms[: len(train)], terms[len(train) :]
    named = [term for term in terms if term]
    taught = set(of_train) - {frozenset()}
    shared = [term for term in of_exam if term in taught]
    if not named or len(named) < _ROWS_OF_A_TERM * len(set(named)):
        return []
    if len(shared) < _COVERED * len(exam):
        return []
    (term, _count) = Counter(shared).most_common(1)[0]
    name = " ".join(sorted(term))[:40]
    rows_of_term = terms.count(term)
    return [
        f"{len(shared)} of {counted(len(exam), 'held-out row')} "
        f"({percent(len(shared) / len(exam), digits=0)}) ask about a term of training rows, such "
        f"as {name!r} in {counted(rows_of_term, 'row')} of both sides: " + _CURE.format(group=name)
    ]


def _words(text: str) -> frozenset[str]:
    """The words of a text: no numbers, no signs, nothing of one letter."""
    return frozenset(token for token in tokens_of(text) if token.isalpha() and len(token) > 1)


def _text(row: Mapping[str, Any]) -> str:
    """The last message of a row's prompt: what it asks."""
    prompt = row["prompt"]
    content = prompt[-1].get("content") if prompt else ""
    return content if isinstance(content, str) else ""


def _shown(text: str) -> str:
    """A prompt in quotes on one line, cut short."""
    line = " ".join(text.split())
    return f'"{line}"' if len(line) <= _SHOWN_CHARS else f'"{line[:_SHOWN_CHARS]}…"'
