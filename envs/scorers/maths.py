"""Whether a final answer is the same mathematics as the expected one.

Both are read into expressions: numbers, letters, + - * / ^, implicit products, fractions, roots,
absolute values, factorials of small numbers, pi, and the LaTeX of these; lists, tuples and sets of
them. Two expressions are the same where they agree to nine digits at POINTS fixed points for their
letters. That is no proof, but two of the few characters that count as an answer which agree at all
of them by chance are not to be expected (Schwartz 1980, Zippel 1979, for polynomials). What cannot
be read is compared as text, white space aside.

An answer without letters may not leave arithmetic to be done: where 4 is expected, "2+2" restates
the question and is not paid. Digits decide otherwise: "0.333" is not 1/3.
"""

import cmath
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from envs.rewards import final_answer

LONGEST = 300  # characters of an answer that is read
POINTS = 8
TOLERANCE = 1e-9  # relative
MOST_FACTORIAL = 20
_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")  # \frac12
_DROPPED = re.compile(
    r"\\left|\\right|\\[,;!: ]|\\mathrm|\\text|\\displaystyle|\$|\\quad|°|\^\\circ"
)
_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)"  # a number
    r"|(\\[a-zA-Z]+|sqrt|pi|[a-zA-Z])"  # a letter, a name
    r"|(\*\*|[-+*/^(){}\[\]|!,]))"  # a sign
)
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "ln": cmath.log,
    "log": cmath.log10,
    "exp": cmath.exp,
}
_WORDS = {"\\pi": "pi", "\\cdot": "*", "\\times": "*", "\\div": "/", "\\sqrt": "sqrt"}
Value = Callable[[dict[str, complex]], complex]


class _Unreadable(Exception):
    """A text that is no expression of this grammar."""


@dataclass
class _Expression:
    """An expression: its value at a point (letter -> number), its letters, and how many sums and
    products it leaves to be done."""

    value: Value
    letters: frozenset[str] = frozenset()
    operations: int = 0


def maths(completion: str, expected: str) -> float:
    """Return 1 if the final answer means the same as `expected`, else 0.

    "x = 5" is 5, "1,200" is 1200; of lists the order counts, of sets in braces it does not.
    """
    answer, target = _clean(final_answer(completion)), _clean(str(expected))
    if not answer or len(answer) > LONGEST:
        return 0.0
    if _spaceless(answer) == _spaceless(target):
        return 1.0
    answers, targets = _parts(answer), _parts(target)
    if len(answers) != len(targets) or _brackets(answer) != _brackets(target):
        return 0.0
    try:
        pairs = [[_same(one, other) for other in targets] for one in answers]
    except (_Unreadable, ArithmeticError, ValueError, RecursionError):
        return 0.0
    if _brackets(target) == "{}":
        return float(all(any(row) for row in pairs) and all(map(any, zip(*pairs, strict=True))))
    return float(all(row[place] for place, row in enumerate(pairs)))


def _clean(text: str) -> str:
    """The text without what is only for show, and without the name before an equals sign."""
    text = _DROPPED.sub(" ", text.strip().rstrip(".").strip()).strip()
    text = text.replace("\\{", "{").replace("\\}", "}").replace("−", "-").replace("\\%", "%")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 1,200
    text = re.sub(r"^\s*(?:[a-zA-Z]|[a-zA-Z]\([a-zA-Z]\))\s*=\s*(?!=)", "", text)
    text = _FRACTION.sub(r"\\frac{\1}{\2}", text)
    return text.rstrip("%").strip()


def _spaceless(text: str) -> str:
    return "".join(text.split())


def _brackets(text: str) -> str:
    """The brackets around a list, "()" and the like; "" for none."""
    outer = text[:1] + text[-1:]
    return outer if outer in ("()", "[]", "(]", "[)", "{}") and len(_split(text[1:-1])) > 1 else ""


def _parts(text: str) -> list[str]:
    """The items of a list in brackets, or separated by commas; the text itself for none."""
    return _split(text[1:-1]) if _brackets(text) else _split(text)


def _split(text: str) -> list[str]:
    """The text at its commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _same(answer: str, target: str) -> bool:
    """Whether two texts are the same expression. Raises _Unreadable, or ArithmeticError or
    ValueError where one has no value."""
    one, other = _Parser(answer).expression(), _Parser(target).expression()
    if one.letters != other.letters:
        return False
    if not other.letters and one.operations > other.operations:
        return False  # arithmetic that is left to be done
    return all(
        cmath.isclose(one.value(point), other.value(point), rel_tol=TOLERANCE, abs_tol=1e-12)
        for point in map(_point, range(POINTS))
    )


def _point(number: int) -> dict[str, complex]:
    """Values for all letters, other ones for each number: irrational, between 0.3 and 3, so that
    roots and logarithms are real."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    fractions = [(math.sqrt(7 * place + 2) * (number + 2)) % 1 for place in range(len(letters))]
    return {
        letter: 0.3 + 2.7 * fraction for letter, fraction in zip(letters, fractions, strict=True)
    }


class _Parser:
    """A recursive descent over the tokens of one text. Every method raises _Unreadable."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        position = 0
        text = text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _Unreadable(text)
            token = match.group(1) or match.group(2) or match.group(3)
            self.tokens.append(_WORDS.get(token, token))
            position = match.end()
        self.place = 0

    def expression(self) -> _Expression:
        """The whole text as one expression."""
        result = self._sum()
        if self.place < len(self.tokens):
            raise _Unreadable(self.tokens[self.place])
        return result

    @property
    def _next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _take(self, *tokens: str) -> str:
        """Take the next token if it is one of these; "" otherwise."""
        token = self._next
        if token and token in tokens:
            self.place += 1
            return token
        return ""

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise _Unreadable(f"{token} expected")

    def _sum(self) -> _Expression:
        result = self._product()
        while sign := self._take("+", "-"):
            result = _joined(result, self._product(), sign, counts=True)
        return result

    def _product(self) -> _Expression:
        result = self._signed()
        while True:
            if sign := self._take("*", "/"):
                # A fraction is a number; a product of two numbers is left to be done.
                result = _joined(result, self._signed(), sign, counts=sign == "*")
            elif self._next and (self._next[0].isalnum() or self._next[0] in "\\({"):
                result = _joined(result, self._power(), "*", counts=False)  # 2x, 3\sqrt{2}
            else:
                return result

    def _signed(self) -> _Expression:
        if self._take("-"):
            inner = self._signed()
            return _Expression(lambda p: -inner.value(p), inner.letters, inner.operations)
        self._take("+")
        return self._power()

    def _power(self) -> _Expression:
        base = self._atom()
        while self._take("!"):
            base = _factorial(base)
        if self._take("^", "**"):
            return _joined(base, self._signed(), "^", counts=True)
        return base

    def _atom(self) -> _Expression:
        """Read what no operator divides: an expression in brackets, a number, a letter, a constant,
        a root, a fraction or a function. Raises _Unreadable for anything else."""
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if self._take(opening):
                inner = self._sum()
                self._expect(closing)
                return inner
        if self._take("|"):
            inner = self._sum()
            self._expect("|")
            return _applied(abs, inner)
        return self._token_value()

    def _token_value(self) -> _Expression:
        """Read the next token, with the arguments that it takes: a number, a letter, a constant, a
        root, a fraction or a function. Raises _Unreadable for anything else."""
        token = self._next
        self.place += 1
        if token[:1].isdigit() or token[:1] == ".":
            number = complex(float(token))
            return _Expression(lambda p: number)
        if token == "pi":
            return _Expression(lambda p: complex(math.pi))
        if token == "sqrt":
            return self._root()
        if token in ("\\frac", "\\dfrac", "\\tfrac"):
            return _joined(self._atom(), self._atom(), "/", counts=False)
        if (name := token.lstrip("\\")) in _FUNCTIONS:
            return _applied(_FUNCTIONS[name], self._power())
        if len(token) == 1 and token.isalpha():
            return _Expression(lambda p: p[token], frozenset(token))
        raise _Unreadable(token or "the end")

    def _root(self) -> _Expression:
        degree: _Expression | None = None
        if self._take("["):
            degree = self._sum()
            self._expect("]")
        inner = self._atom()
        degree_value = degree.value if degree else lambda p: complex(2)
        return _Expression(
            lambda p: inner.value(p) ** (1 / degree_value(p)), inner.letters, inner.operations
        )


def _applied(function: Callable[[complex], complex], inner: _Expression) -> _Expression:
    """A function of an expression."""
    return _Expression(lambda p: function(inner.value(p)), inner.letters, inner.operations)


def _joined(one: _Expression, other: _Expression, sign: str, *, counts: bool) -> _Expression:
    """Two expressions with a sign between; `counts`: as an operation that is left to be done."""
    operations: dict[str, Callable[[complex, complex], complex]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
        "^": lambda a, b: a**b,
    }
    operation = operations[sign]
    return _Expression(
        lambda p: operation(one.value(p), other.value(p)),
        one.letters | other.letters,
        one.operations + other.operations + counts,
    )


def _factorial(inner: _Expression) -> _Expression:
    """The factorial of an expression; its value raises ValueError but for small whole numbers."""

    def value(point: dict[str, complex]) -> complex:
        number = inner.value(point)
        whole = round(number.real)
        if abs(number - whole) > TOLERANCE or not 0 <= whole <= MOST_FACTORIAL:
            raise ValueError("a factorial of a small whole number is expected")
        return complex(math.factorial(whole))

    return _Expression(value, inner.letters, inner.operations + 1)
