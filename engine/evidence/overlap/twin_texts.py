"""A question and its answer as what twins are told by: its words, numbers, signs and grammar.

The words of grammar are those of English.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from engine.evidence.overlap.words import tokens_of

_STEM_CHARS = 5  # "buy" and "buys", "apple" and "apples" are one word
_CODE_LETTERS = 0.45  # different letters of a code at most, as a part of its length

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
_LETTERS_OF_WORDS = frozenset("ai")  # the words a and I
_NUMBER_WORDS = frozenset(
    (
        "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
        "hundred thousand million"
    ).split()
)
_NUMBER = re.compile(r"[-+]?\d")
_CAPITAL = re.compile(r"(?<=[a-z0-9,;] )[A-Z][a-z]+\b")  # not at the beginning of a sentence
ANY_NUMBER, _PERSON = "#", "he"


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
        """The words, numbers and operators of the reference answer; [] if there is none."""
        return tokens_of(self.answer)

    @cached_property
    def content(self) -> frozenset[str]:
        """What the task is about: numbers, stems of words that are not of grammar, the answer."""
        words = frozenset(_content_words(self.tokens))
        answer = " ".join(self.answer_tokens)
        stands_in_question = words.issuperset(_content_words(self.answer_tokens))
        if not answer or stands_in_question:  # such an answer tells nothing more
            return words
        # Marked, so that an answer is not taken for a word of a question.
        return words | {f"= {answer}"}

    @cached_property
    def capitals(self) -> frozenset[str]:
        """The words that stand with a capital letter inside a sentence, in lower case."""
        return frozenset(map(str.casefold, _CAPITAL.findall(self.question)))

    def symbols(self, names: frozenset[str]) -> Counter[str]:
        """Return the numbers and single letters of the question, each with how often it stands
        there, and those of `names` (proper nouns, in lower case) that stand there, each once."""
        signs = Counter(token for token in self.tokens if is_number(token) or is_letter(token))
        return signs + Counter(names.intersection(self.tokens))

    @cached_property
    def without_numbers(self) -> tuple[str, ...]:
        """The tokens of the question, with "#" in place of each number."""
        return tuple(ANY_NUMBER if is_number(token) else token for token in self.tokens)

    @cached_property
    def around_signs(self) -> tuple[str, ...]:
        """The words of the question, with one "#" for each row of numbers, operators and letters:
        `Calculate 3 * 4` gives calculate, #."""
        kept = (ANY_NUMBER if is_sign(t) or is_letter(t) else t for t in self.tokens)
        return tuple(token for token, _row in groupby(kept))

    @cached_property
    def grammar(self) -> tuple[str, ...]:
        """The words of grammar of the question in their order, with "he" for every pronoun and one
        "#" for each row of numbers."""
        return tuple(_grammar_words(self.tokens))


def _content_words(tokens: Iterable[str]) -> Iterator[str]:
    """Yield what the tokens are about: numbers as they are, and stems of words outside grammar."""
    for token in tokens:
        if is_number(token):
            yield token
        elif token not in _GRAMMAR and token not in _PRONOUNS:
            yield stem(token)


def stem(token: str) -> str:
    """Return the first characters of a word, so that "buy" and "buys" are one; a number or a code
    whole."""
    if not token.isalpha() or is_number(token) or is_code(token):
        return token
    return token[:_STEM_CHARS]


def is_code(token: str) -> bool:
    """Return whether a word repeats its letters as words seldom do, such as "abacabadba"."""
    is_long = len(token) > _STEM_CHARS
    return is_long and len(set(token)) <= _CODE_LETTERS * len(token)


def _grammar_words(tokens: Iterable[str]) -> Iterator[str]:
    """Yield the words of grammar, "he" for every pronoun and one "#" for each row of numbers.

    `how many apples has she 3 4` gives how, many, has, he, #.
    """
    previous_word = ""
    for token in tokens:
        if is_number(token):
            word = ANY_NUMBER
        elif token in _PRONOUNS:
            word = _PERSON
        elif token in _GRAMMAR:
            word = token
        else:
            continue
        if word != ANY_NUMBER or previous_word != ANY_NUMBER:
            yield word
        previous_word = word


def is_number(token: str) -> bool:
    """Return whether a token is a number in digits or in English words."""
    return token[0].isdigit() or token in _NUMBER_WORDS


def is_letter(token: str) -> bool:
    """Return whether a token is one letter that names something, such as x or the letter "n"."""
    return len(token) == 1 and token.isalpha() and token not in _LETTERS_OF_WORDS


def is_sign(token: str) -> bool:
    """Return whether a token is a number, an operator or a bracket."""
    return is_number(token) or not token[0].isalnum()
