"""What can be measured on answers as text, without a tokenizer and in any language."""

import re
from collections.abc import Sequence

# A word, one sign, or one character of a script that writes no blanks.
_PIECE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+|[^\w\s]|_")
_WRAPPED = re.compile(
    r"^\s*(?:```|[\"'`“][^\n]*[\"'`”]\s*$|(?:sure|certainly|of course|great question)\b)", re.I
)
_NGRAM = 4
_FEWEST_TEXTS = 4  # below it a share of texts means nothing
_FEWEST_NGRAMS = 8  # below it one repeated phrase would be a third of the text
_LONG_PIECES = 12  # shorter texts are alike only if they are equal
_ALIKE = 0.7  # Jaccard index of the four-grams from which two texts count as alike
_MOST_PIECES = 800  # bounds the time; the beginning of a longer answer is enough
_MOST_CHARS = 10_000  # looked at, enough for so many pieces of usual text


def pieces(text: str) -> list[str]:
    """The words and signs of a text in lower case; at most the first 800."""
    return [match.group().lower() for match in _PIECE.finditer(text[:_MOST_CHARS])][:_MOST_PIECES]


def repeated_share(text: str) -> float:
    """The share of four-grams that occurred before in the same text; 0 for a short text."""
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
    """The share of neighbours in `texts` (answers to different tasks) that say the same.

    Each text is compared with the next one, the last with the first. None for fewer than four
    texts, too few for a share.
    """
    if len(texts) < _FEWEST_TEXTS:
        return None
    texts_in_pieces = [pieces(text) for text in texts]
    neighbours = zip(texts_in_pieces, [*texts_in_pieces[1:], texts_in_pieces[0]], strict=True)
    return sum(_alike(first, second) for first, second in neighbours) / len(texts)


def _alike(first: list[str], second: list[str]) -> bool:
    """Whether two texts (as pieces) are equal, or long and with nearly the same four-grams."""
    if first == second:
        return True
    if min(len(first), len(second)) < _LONG_PIECES:
        return False
    grams1, grams2 = set(_grams(first)), set(_grams(second))
    return len(grams1 & grams2) >= _ALIKE * len(grams1 | grams2)


def _grams(parts: Sequence[str]) -> list[tuple[str, ...]]:
    """Every sequence of four neighbouring pieces; [] for fewer than four."""
    return [tuple(parts[start : start + _NGRAM]) for start in range(len(parts) - _NGRAM + 1)]
