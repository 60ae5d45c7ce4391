"""Splits a text into normalised words, numbers and operators (tokens), and into lines, sentences
and word sequences. `overlap.py` compares these."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

GRAM_WORDS = 8  # words of one indexed sequence
MOST_CHARS = 200_000  # of one text that are compared

# Chinese, Japanese and Korean characters: written without blanks, so each is a token.
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_LOGIC = "¬∧∨⊕→↔⇒⇔"
_OPERATORS = frozenset("- + * / ^ = < > % ± × ÷ √ ≤ ≥ ≠ ** // == <= >= !=".split()).union(_LOGIC)
_PREFIXES = frozenset("-√¬")  # operators that need an operand on the right alone
_TOKEN = re.compile(
    rf"[{_CJK}]|[^\W_{_CJK}]+(?:[.,][0-9]+)*|\*\*|//|[=<>!]=|[-+*/^=<>%±×÷√≤≥≠{_LOGIC}]|[()\[\]]"
)
_DASHES = str.maketrans({"‐": "-", "‑": "-", "‒": "-", "–": "-", "−": "-", "⁄": "/", "·": "*"})
_APOSTROPHE = re.compile(r"(?<=[^\W\d_])['’](?=[^\W\d_])")
_SENTENCE = re.compile(r"(?<=[.?!])\s+")
_LABELS = {"q", "question", "problem", "task", "user", "prompt", "input", "exercise"}


def tokens_of(text: str) -> list[str]:
    """The words, numbers and operators of a text in a normalised form: "What's 3 – 4?" -> ["whats",
    "3", "-", "4"].

    Case, spacing, apostrophes and the many kinds of dashes make no difference. An operator counts
    only if it has operands (numbers or single letters), and a bracket only beside an operator:
    elsewhere they are punctuation or markup and are left out.
    """
    # NFKC makes one character of those that differ in form alone, such as full-width digits.
    normalised = unicodedata.normalize("NFKC", text[:MOST_CHARS]).casefold().translate(_DASHES)
    without_apostrophes = _APOSTROPHE.sub("", normalised)
    tokens = _TOKEN.findall(without_apostrophes)
    return [token for index, token in enumerate(tokens) if _has_meaning(tokens, index)]


def segments(text: str, *, with_entire_text: bool) -> Iterable[list[str]]:
    """Yield the tokens of each line of a text, and after each line those of its sentences.

    A line is yielded only if the text has several, a sentence only if its line has several. With
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


def lookup_keys(tokens: Sequence[str]) -> list[str]:
    """The keys under which a segment (line or sentence) may be indexed: its tokens, joined by
    blanks.

    If the segment begins with a label such as `Question:`, a second key leaves out the label.
    """
    keys = [" ".join(tokens)]
    if len(tokens) > 1 and tokens[0] in _LABELS:
        keys.append(" ".join(tokens[1:]))
    return keys


def grams_of(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Every sequence of `GRAM_WORDS` consecutive tokens. None for a text with fewer tokens."""
    starts = range(len(tokens) - GRAM_WORDS + 1)
    return (tuple(tokens[start : start + GRAM_WORDS]) for start in starts)


def numbers_of(tokens: Iterable[str]) -> set[str]:
    """The different tokens that begin with a digit."""
    return {token for token in tokens if token[0].isdigit()}


def answers_agree(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether the shorter of two answers (lists of tokens) stands in the longer one.

    An empty answer agrees with every other: there is nothing that could contradict.
    """
    shorter, longer = sorted((list(first), list(second)), key=len)
    length = len(shorter)
    starts = range(len(longer) - length + 1)
    return any(longer[start : start + length] == shorter for start in starts)


def _has_meaning(tokens: Sequence[str], index: int) -> bool:
    """Whether the token at `index` is more than punctuation or markup.

    An operator has meaning if it has operands, an opening bracket if an operator stands directly
    before it, and a closing bracket if one follows directly. Any other token has meaning.
    """
    token = tokens[index]
    if token in _OPERATORS:
        return _has_operands(tokens, index)
    if token in "([":
        return index > 0 and tokens[index - 1] in _OPERATORS
    if token in ")]":
        return index + 1 < len(tokens) and tokens[index + 1] in _OPERATORS
    return True


def _has_operands(tokens: Sequence[str], index: int) -> bool:
    """Whether the operator at `index` stands beside the operands that it needs.

    %, -, √ and ¬ need one operand, on one side; every other operator needs one on each side.
    """
    operator = tokens[index]
    has_left = _is_operand(tokens, index - 1)
    after = index + 1  # where the operand on the right begins
    while after < len(tokens) and tokens[after] == "¬":  # any number of them, as in ¬¬p
        after += 1
    has_right = _is_operand(tokens, after)
    # These operators need an operand on one side only: 5%, -3, √2, ¬p.
    if operator == "%":
        return has_left
    if operator in _PREFIXES:
        return has_right
    # The operand on the right may have a prefix, as in 3 * -2.
    prefix_follows = after < len(tokens) and tokens[after] in _PREFIXES
    has_signed_right = prefix_follows and _is_operand(tokens, after + 1)
    return has_left and (has_right or has_signed_right)


def _is_operand(tokens: Sequence[str], index: int) -> bool:
    """Whether the token at `index` is an operand: a number, a single letter, or a bracket next to
    one.

    Returns False if `index` is outside the list.
    """
    if not 0 <= index < len(tokens):
        return False
    token = tokens[index]
    if token in _OPERATORS:
        return False
    if token in "()[]":
        # A bracket is an operand if the token next to it, on its inner side, is one; a bracket next
        # to another bracket is not.
        inner_index = index + 1 if token in "([" else index - 1
        if not 0 <= inner_index < len(tokens):
            return False
        return tokens[inner_index] not in "()[]" and _is_operand(tokens, inner_index)
    return len(token) == 1 or token[0].isdigit()
