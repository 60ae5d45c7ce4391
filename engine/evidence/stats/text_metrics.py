"""Measurements on answers as text that need no tokenizer and work in any language."""

import re
from collections.abc import Sequence

# A word, one punctuation mark, or one character of a script without blanks between words.
_PIECE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+|[^\w\s]|_")
_WRAPPED = re.compile(
    r"^\s*(?:```|[\"'`“][^\n]*[\"'`”]\s*$|(?:sure|certainly|of course|great question)\b)", re.I
)
_NGRAM = 4
_FEWEST_TEXTS = 4  # below it a share of texts means nothing
_FEWEST_NGRAMS = 8  # below it one repeated phrase would be a third of the text
_LONG_PIECES = 12  # words and signs; shorter texts are alike only if they are equal
_MIN_SHARED_GRAMS = 0.7  # two texts are alike if they share this part of the four-grams of both
_MOST_PIECES = 800  # bounds the time; the beginning of a longer answer is enough
_MOST_CHARS = 10_000  # of a text that are split: enough for _MOST_PIECES of usual text


def pieces(text: str) -> list[str]:
    """The words and punctuation marks of a text in lower case: "Fine, 42." -> ["fine", ",", "42",
    "."].

    At most the first `_MOST_PIECES` of them.
    """
    start = text[:_MOST_CHARS]
    if start.isascii():  # faster; in other text, lower case might change where a piece ends
        return _PIECE.findall(start.lower())[:_MOST_PIECES]
    return [piece.lower() for piece in _PIECE.findall(start)[:_MOST_PIECES]]


def repeated_share(text: str) -> float:
    """The share of four-grams (four words or signs in a row) that occurred earlier in the same
    text.

    Returns 0 for a text of fewer than `_FEWEST_NGRAMS` four-grams, in which one phrase would weigh
    too much.
    """
    grams = _grams(pieces(text))
    if len(grams) < _FEWEST_NGRAMS:
        return 0.0
    return 1.0 - len(set(grams)) / len(grams)


def is_wrapped(text: str) -> bool:
    """Whether the answer stands in a code fence, in quotes or behind a polite phrase such as
    "Sure"."""
    return _WRAPPED.match(text) is not None


def without_case_and_blanks(text: str) -> str:
    """The text in lower case, with every run of blanks and line ends as one blank.

    Texts that differ in nothing else become equal.
    """
    return " ".join(text.lower().split())


def alike_share(texts: Sequence[str]) -> float | None:
    """The share of texts that say the same as the next one; the last is compared with the first.

    `texts` are answers to different tasks. Returns None for fewer than `_FEWEST_TEXTS` of them.
    """
    if len(texts) < _FEWEST_TEXTS:
        return None
    texts_in_pieces = [pieces(text) for text in texts]
    next_texts = [*texts_in_pieces[1:], texts_in_pieces[0]]
    neighbours = zip(texts_in_pieces, next_texts, strict=True)
    return sum(_say_the_same(first, second) for first, second in neighbours) / len(texts)


def _say_the_same(first: list[str], second: list[str]) -> bool:
    """Whether two texts, each split into words and signs (`pieces`), say the same.

    They do if they are equal, or if both are long and share most of their four-grams (the Jaccard
    index is at least `_MIN_SHARED_GRAMS`).
    """
    if first == second:
        return True
    if min(len(first), len(second)) < _LONG_PIECES:
        return False
    first_grams, second_grams = set(_grams(first)), set(_grams(second))
    shared, in_either = first_grams & second_grams, first_grams | second_grams
    return len(shared) >= _MIN_SHARED_GRAMS * len(in_either)


def _grams(text: Sequence[str]) -> list[tuple[str, ...]]:
    """Every sequence of four consecutive words or signs (`pieces`) of a text; [] if there are
    fewer."""
    # The text beside itself, each time one piece later: `zip` stops at the end of the shortest.
    shifted_texts = [text[start:] for start in range(_NGRAM)]
    return list(zip(*shifted_texts, strict=False))
