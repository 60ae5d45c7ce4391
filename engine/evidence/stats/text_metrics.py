"""What can be measured on answers as text, without a tokenizer and in any language."""

import re
from collections.abc import Sequence

# A word, one sign, or one character of a script that writes no blanks.
_PIECE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+|[^\w\s]|_")
_WRAPPED = re.compile(
    r"^\s*(?:```|[\"'`“][^\n]*[\"'`”]\s*$|(?:sure|certainly|of course|great question)\b)", re.I
)
_NGRAM = 4
_FEWEST_NGRAMS = 8  # below it one repeated phrase would be a third of the text
_LONG_PIECES = 12  # texts at least so long can be alike without being equal
_ALIKE = 0.7  # Jaccard of the four-grams
_MOST_PIECES = 800


def pieces(text: str) -> list[str]:
    """Words and signs, lower case; at most the first 800."""
    return [match.group().lower() for match in _PIECE.finditer(text[:10_000])][:_MOST_PIECES]


def repeated_share(text: str) -> float:
    """Share of four-grams that occurred before in the same text; 0 for short texts."""
    grams = _grams(pieces(text))
    if len(grams) < _FEWEST_NGRAMS:
        return 0.0
    return 1.0 - len(set(grams)) / len(grams)


def wrapped(text: str) -> bool:
    """Whether the answer stands in a code fence, in quotes or behind a phrase of courtesy."""
    return _WRAPPED.match(text) is not None


def plain(text: str) -> str:
    """The text without differences of case and blanks."""
    return " ".join(text.lower().split())


def alike_share(texts: Sequence[str]) -> float | None:
    """Share of neighbours in `texts` (answers to different tasks) that say the same.

    Equal, or for longer texts with nearly the same four-grams. None for fewer than four texts.
    """
    if len(texts) < _NGRAM:
        return None
    split = [pieces(text) for text in texts]
    pairs = list(zip(split, [*split[1:], split[0]], strict=True))
    return sum(_alike(first, second) for first, second in pairs) / len(pairs)


def _alike(first: list[str], second: list[str]) -> bool:
    if first == second:
        return True
    if min(len(first), len(second)) < _LONG_PIECES:
        return False
    left, right = set(_grams(first)), set(_grams(second))
    return len(left & right) >= _ALIKE * len(left | right)


def _grams(parts: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(parts[start : start + _NGRAM]) for start in range(len(parts) - _NGRAM + 1)]
