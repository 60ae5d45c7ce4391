"""Whether a final answer is the same mathematics as the expected one.

Both are parsed into expressions: numbers, letters, + - * / ^, implicit products, fractions, roots,
absolute values, factorials of small numbers, pi, and the LaTeX of these; also lists, tuples and
sets of them. Two expressions count as the same if their values agree to nine digits at POINTS
fixed values of their letters. That is no proof, but different expressions as short as an answer
hardly ever agree at all points by chance (Schwartz 1980, Zippel 1979, for polynomials). What cannot
be parsed is compared as text, without white space.

An answer without letters may not leave arithmetic to be done: if 4 is expected, "2+2" only restates
the question and earns 0. Rounded decimals are not accepted either: "0.333" is not 1/3.
"""

import cmath
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from envs.rewards import final_answer

LONGEST = 300  # characters; a longer answer is wrong
POINTS = 8  # at how many values of the letters expressions are compared
TOLERANCE = 1e-9  # relative
MOST_FACTORIAL = 20  # the largest n of n!, so that no answer takes long to compute
_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")  # e.g. \frac12
# Formatting that does not change the meaning.
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
# The value of an expression at a point (letter -> number).
Value = Callable[[dict[str, complex]], complex]


class _Unreadable(Exception):
    """Raised for a text that is not an expression of this grammar."""


@dataclass
class _Expression:
    """A parsed expression.

    Attributes:
        value: its value at a point (letter -> number).
        letters: the letters in it.
        operations: how many sums and products it leaves to be done, e.g. 1 for "2+2", 0 for "4".
    """

    value: Value
    letters: frozenset[str] = frozenset()
    operations: int = 0


def maths(completion: str, expected: str) -> float:
    """Return 1 if the final answer means the same as `expected`, else 0.

    "x = 5" equals 5, and "1,200" equals 1200. The order of items counts in lists, but not in sets
    in braces.
    """
    answer, target = _clean(final_answer(completion)), _clean(str(expected))
    if not answer or len(answer) > LONGEST:
        return 0.0
    if _spaceless(answer) == _spaceless(target):
        return 1.0
    answers, targets = _items_of(answer), _items_of(target)
    if len(answers) != len(targets) or _brackets(answer) != _brackets(target):
        return 0.0
    is_equal: list[list[bool]] = []  # [i][j]: whether item i of the answer is item j of the target
    try:
        for item in answers:
            is_equal.append([_is_same_expression(item, target_item) for target_item in targets])
    except (_Unreadable, ArithmeticError, ValueError, RecursionError):  # no value to compare
        return 0.0
    if _brackets(target) == "{}":  # sets: each item of one must equal some item of the other
        is_in_target = [any(row) for row in is_equal]  # for each item of the answer
        is_in_answer = [any(column) for column in zip(*is_equal, strict=True)]  # and the reverse
        return float(all(is_in_target) and all(is_in_answer))
    # Lists: the items at the same place must be equal.
    return float(all(is_equal[index][index] for index in range(len(answers))))


def _clean(text: str) -> str:
    """Return the text without formatting (such as \\left, $, %), without commas between thousands,
    and without a leading "x =" or "f(x) =".

    Short LaTeX is completed: \\frac12 becomes \\frac{1}{2}.
    """
    text = _DROPPED.sub(" ", text.strip().rstrip(".").strip()).strip()
    text = text.replace("\\{", "{").replace("\\}", "}").replace("−", "-").replace("\\%", "%")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 1,200 becomes 1200
    # Remove "x =" or "f(x) =" at the beginning.
    text = re.sub(r"^\s*(?:[a-zA-Z]|[a-zA-Z]\([a-zA-Z]\))\s*=\s*(?!=)", "", text)
    text = _FRACTION.sub(r"\\frac{\1}{\2}", text)
    return text.rstrip("%").strip()


def _spaceless(text: str) -> str:
    """Return the text without any white space."""
    return "".join(text.split())


def _brackets(text: str) -> str:
    """Return the brackets around a list of several items, such as "()"; "" if the text is no such
    list."""
    outer = text[:1] + text[-1:]
    if outer not in ("()", "[]", "(]", "[)", "{}"):  # half-open intervals too
        return ""
    has_several_items = len(_split_at_commas(text[1:-1])) > 1
    return outer if has_several_items else ""


def _items_of(text: str) -> list[str]:
    """Return the items of a list in brackets, or of items separated by commas; a single text is one
    item."""
    return _split_at_commas(text[1:-1]) if _brackets(text) else _split_at_commas(text)


def _split_at_commas(text: str) -> list[str]:
    """Split the text at its commas that are outside of brackets."""
    parts, depth = [""], 0  # depth: how many brackets are open
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _is_same_expression(answer: str, target: str) -> bool:
    """Whether two texts are the same expression, by its values at POINTS fixed points.

    Raises _Unreadable if one cannot be parsed, ArithmeticError or ValueError if one has no value.
    """
    left, right = _Parser(answer).expression(), _Parser(target).expression()
    if left.letters != right.letters:
        return False
    # The answer leaves arithmetic to be done, such as "2+2" for 4.
    if not right.letters and left.operations > right.operations:
        return False
    # Without a proof: both must have the same value at each of the fixed points.
    for number in range(POINTS):
        point = _sample_point(number)
        left_value, right_value = left.value(point), right.value(point)
        if not cmath.isclose(left_value, right_value, rel_tol=TOLERANCE, abs_tol=1e-12):
            return False
    return True


def _sample_point(number: int) -> dict[str, complex]:
    """Return a value for each letter: the fixed point with this number.

    The values lie between 0.3 and 3, so that roots and logarithms are real. They come from square
    roots, so that different expressions do not agree by chance.
    """
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    point: dict[str, complex] = {}
    for place, letter in enumerate(letters):
        fraction = (math.sqrt(7 * place + 2) * (number + 2)) % 1  # between 0 and 1
        point[letter] = 0.3 + 2.7 * fraction
    return point


class _Parser:
    """A recursive-descent parser for one text. Every method raises _Unreadable at a token it cannot
    use."""

    def __init__(self, text: str) -> None:
        """Split the text into tokens. Raises _Unreadable at a character that begins no token."""
        self.tokens: list[str] = []
        position = 0
        text = text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _Unreadable(text)
            number, word, sign = match.groups()  # exactly one of them has matched
            token = number or word or sign
            self.tokens.append(_WORDS.get(token, token))
            position = match.end()
        self.place = 0

    def expression(self) -> _Expression:
        """Parse the whole text as one expression."""
        result = self._sum()
        if self.place < len(self.tokens):
            raise _Unreadable(self.tokens[self.place])
        return result

    @property
    def _next(self) -> str:
        """The next token of the text, which stays the next; "" at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _take(self, *tokens: str) -> str:
        """Go past the next token and return it, if it is one of `tokens`; otherwise return ""."""
        token = self._next
        if token and token in tokens:
            self.place += 1
            return token
        return ""

    def _expect(self, token: str) -> None:
        """Go past the next token. Raises _Unreadable unless it is `token`."""
        if not self._take(token):
            raise _Unreadable(f"{token} expected")

    def _sum(self) -> _Expression:
        """Parse products joined by + and -."""
        result = self._product()
        while sign := self._take("+", "-"):
            result = _combined(result, self._product(), sign, counts=True)
        return result

    def _product(self) -> _Expression:
        """Parse factors joined by *, / or nothing (an implicit product such as 2x)."""
        result = self._signed()
        while True:
            if sign := self._take("*", "/"):
                # A fraction is a number; a product of two numbers is left to be done.
                result = _combined(result, self._signed(), sign, counts=sign == "*")
            elif self._next and (self._next[0].isalnum() or self._next[0] in "\\({"):
                # What begins another factor, without a sign before it: 2x, 3\sqrt{2}
                result = _combined(result, self._power(), "*", counts=False)
            else:
                return result

    def _signed(self) -> _Expression:
        """Parse a power (x, x^2, 3!) with any number of minus signs or one plus sign before it."""
        if self._take("-"):
            inner = self._signed()
            return _Expression(lambda point: -inner.value(point), inner.letters, inner.operations)
        self._take("+")  # changes nothing
        return self._power()

    def _power(self) -> _Expression:
        """Parse an atom with factorials and an exponent behind it; -x^2 is -(x^2)."""
        base = self._atom()
        while self._take("!"):
            base = _factorial(base)
        if self._take("^", "**"):
            return _combined(base, self._signed(), "^", counts=True)
        return base

    def _atom(self) -> _Expression:
        """Parse the smallest unit: an expression in brackets or bars, or what `_token_value`
        reads."""
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
        """Parse the next token and its arguments: a number, a letter, a constant, a root, a
        fraction or a function.

        Raises _Unreadable if the token is none of these.
        """
        token = self._next
        self.place += 1
        if token[:1].isdigit() or token[:1] == ".":
            number = complex(float(token))
            return _Expression(lambda point: number)
        if token == "pi":
            return _Expression(lambda point: complex(math.pi))
        if token == "sqrt":
            return self._root()
        if token in ("\\frac", "\\dfrac", "\\tfrac"):
            return _combined(self._atom(), self._atom(), "/", counts=False)
        function_name = token.lstrip("\\")  # LaTeX writes \sin
        if function_name in _FUNCTIONS:
            return _applied(_FUNCTIONS[function_name], self._power())
        if len(token) == 1 and token.isalpha():
            return _Expression(lambda point: point[token], frozenset(token))
        raise _Unreadable(token or "the end")

    def _root(self) -> _Expression:
        """Parse what follows "sqrt": an optional degree in square brackets, then the radicand."""
        degree = _Expression(lambda point: complex(2))  # a square root
        if self._take("["):
            degree = self._sum()
            self._expect("]")
        radicand = self._atom()
        return _Expression(
            lambda point: radicand.value(point) ** (1 / degree.value(point)),
            radicand.letters,
            radicand.operations,
        )


def _applied(function: Callable[[complex], complex], inner: _Expression) -> _Expression:
    """Return the expression `function(inner)`, where `function` maps a number to a number."""
    return _Expression(lambda point: function(inner.value(point)), inner.letters, inner.operations)


def _combined(left: _Expression, right: _Expression, sign: str, *, counts: bool) -> _Expression:
    """Return the expression `left sign right`, where `sign` is one of + - * / ^.

    `counts`: whether it is an operation left to be done, as 2+2 is and the fraction 1/3 is not.
    """
    operations: dict[str, Callable[[complex, complex], complex]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
        "^": lambda a, b: a**b,
    }
    operation = operations[sign]
    return _Expression(
        lambda point: operation(left.value(point), right.value(point)),
        left.letters | right.letters,
        left.operations + right.operations + counts,
    )


def _factorial(inner: _Expression) -> _Expression:
    """Return the factorial of an expression.

    Its value raises ValueError unless the inner value is a whole number from 0 to MOST_FACTORIAL.
    """

    def value(point: dict[str, complex]) -> complex:
        """Return the factorial at a point (letter -> number)."""
        number = inner.value(point)
        whole = round(number.real)
        if abs(number - whole) > TOLERANCE or not 0 <= whole <= MOST_FACTORIAL:
            raise ValueError("a factorial of a small whole number is expected")
        return complex(math.factorial(whole))

    return _Expression(value, inner.letters, inner.operations + 1)
