"""Filter expressions over rows, such as `reward < 0.5 and stop_reason == "length"`.

One small language for `read_rollouts` and `curate`: comparisons, and/or/not, arithmetic and a few
functions over named values. Evaluated by simpleeval on a syntax tree that was checked against an
allow-list first, so nothing else of Python can be reached.
"""

import ast
import difflib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import simpleeval

from engine.core.errors import UserError

LONGEST = 500  # the most characters of an expression
_SHOWN_CHARS = 200  # the most characters of an expression that an error repeats
# The most digits to which round() rounds. A float has no more, and rounding to a million digits
# would never end.
_MOST_DIGITS = 15
_LOGIC = (ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not)
_COMPARISONS = (ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MEMBERSHIP = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
_ARITHMETIC = (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_SIGNS = (ast.USub, ast.UAdd)
_VALUES = (ast.Name, ast.Load, ast.Constant, ast.Call, ast.Subscript, ast.List, ast.Tuple)
_NODES = (
    ast.Expression,
    *_LOGIC,
    *_COMPARISONS,
    *_MEMBERSHIP,
    *_ARITHMETIC,
    *_SIGNS,
    *_VALUES,
)


def _rounded(value: float, digits: int = 0) -> float:
    """Round like Python's `round`, but with `digits` limited to 0..15."""
    return round(value, max(0, min(int(digits), _MOST_DIGITS)))


def _numbers_only(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap an arithmetic operation so that it raises TypeError unless both operands are numbers.

    Python's own operators also accept texts, and an expression such as "a" * 10**9 or
    "%999999999d" % 1 would fill the memory.
    """

    def apply(left: Any, right: Any) -> Any:
        """Return the result of the operation; raise TypeError unless both operands are numbers."""
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            raise TypeError("arithmetic needs numbers on both sides")
        return operation(left, right)

    return apply


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": _rounded,
    "len": len,
}
_OPERATORS = simpleeval.DEFAULT_OPERATORS | {
    ast.Add: _numbers_only(operator.add),
    ast.Sub: _numbers_only(operator.sub),
    ast.Mult: _numbers_only(operator.mul),
    ast.Div: _numbers_only(operator.truediv),
    ast.FloorDiv: _numbers_only(operator.floordiv),
    ast.Mod: _numbers_only(operator.mod),
}
_WORDS = {"true": True, "false": False, "null": None, "none": None}
# Exceptions of the evaluation of a checked expression. InvalidExpression: a limit of simpleeval was
# exceeded. KeyError: metrics["name"] is missing. IndexError: [1, 2][5]. TypeError: 1 < "a".
# ValueError, ArithmeticError: min() of nothing, a division by zero, a number that is too large.
_EVALUATION_ERRORS = (
    simpleeval.InvalidExpression,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    ArithmeticError,
)


def _replace_former_values(tree: ast.expr, former_values: Mapping[str, Mapping[str, str]]) -> None:
    """Replace texts of earlier versions in the comparisons of an expression, in place.

    For example `stop_reason == "length"` becomes `stop_reason == "max_tokens"` if the former values
    are {"stop_reason": {"length": "max_tokens"}}.

    Args:
        tree: the syntax tree of the expression.
        former_values: name of a value -> {text of an earlier version -> present text}.
    """
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    for comparison in comparisons:
        operands = [comparison.left, *comparison.comparators]
        names = {operand.id for operand in operands if isinstance(operand, ast.Name)}
        new_texts: dict[str, str] = {}
        for name in names:
            new_texts |= former_values.get(name, {})
        for operand in operands:
            _replace_texts(operand, new_texts)


def _replace_texts(operand: ast.expr, new_texts: Mapping[str, str]) -> None:
    """Replace the text constants in an operand by their values in `new_texts`, in place.

    `new_texts` maps old text -> new text; other texts stay. The operand may be a list of texts, as
    in `kind in ["a", "b"]`.
    """
    for node in ast.walk(operand):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = new_texts.get(node.value, node.value)


def _names_in(tree: ast.expr | None) -> set[str]:
    """Return the names that an expression uses; an empty set if there is no expression (None)."""
    if tree is None:
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_plain(constant: ast.Constant) -> bool:
    """Return whether a constant is a number, a text, True, False or None.

    Bytes, complex numbers and `...` are not allowed.
    """
    return isinstance(constant.value, bool | int | float | str | None)


def _is_plain_call(call: ast.Call) -> bool:
    """Return whether the call is one of `_FUNCTIONS` without keyword arguments."""
    return isinstance(call.func, ast.Name) and call.func.id in _FUNCTIONS and not call.keywords


class Where:
    """One parsed filter expression, such as `reward < 0.5 and length > 20`."""

    def __init__(
        self,
        expression: str,
        names: Iterable[str],
        field: str = "where",
        *,
        shown: str = "",
        example: str = "reward < 0.5 and length > 20",
        former_values: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Parse and check the expression.

        Args:
            expression: the text; "" matches every row.
            names: the names of values that the expression may use.
            field: the argument that held the text, for the error.
            shown: the text as the caller wrote it, if `expression` is a rewriting of it; else "".
            example: a valid expression, which the error shows.
            former_values: name of a value -> {text of an earlier version -> present text}. The
                expression may use either text.

        Raises UserError BAD_ARGUMENT if the text is no expression, uses an unknown name, or uses
        something that is not allowed.
        """
        self.expression = expression.strip()
        self.field = field
        self.shown = shown or self.expression
        self.example = example
        self._known_names = {*names}
        self._tree: ast.expr | None = None
        if self.expression:
            self._tree = self._parse()
            _replace_former_values(self._tree, former_values or {})
        # The values that the expression uses.
        self._used_names = _names_in(self._tree) & self._known_names
        self._evaluator = simpleeval.EvalWithCompoundTypes(
            operators=_OPERATORS, functions=dict(_FUNCTIONS), allowed_attrs={}
        )

    def matches(self, values: Mapping[str, Any], task: str) -> bool:
        """Return whether a row matches the expression.

        A row does not match if the expression orders or computes with a value that the row does not
        have. An empty expression matches every row.

        Args:
            values: the row's values by name.
            task: id of the row's task, for the error.

        Raises UserError BAD_ARGUMENT if the expression divides by zero, cannot be computed, or has
        a result that is not true or false.
        """
        if self._tree is None:
            return True
        row = {name: values.get(name) for name in self._known_names}
        self._evaluator.names = {**_WORDS, **row}
        try:
            result = self._evaluator.eval(self.expression, previously_parsed=ast.Expr(self._tree))
        except _EVALUATION_ERRORS as error:
            if self._lacks_value(error, row):
                return False
            if isinstance(error, ZeroDivisionError):
                raise self._error(f"divides by zero on task {task!r}") from None
            raise self._error(f"cannot be worked out on task {task!r}: {error}") from None
        if result is None:  # the expression is only a name, and the row has no such value
            return False
        if not isinstance(result, bool):
            raise self._error(f"gives {result!r} on task {task!r}, not true or false")
        return result

    def _lacks_value(self, error: Exception, row: Mapping[str, Any]) -> bool:
        """Return whether `error`, raised by the evaluation, means that the row lacks a value.

        That is so if the row has no such metric (KeyError), or if an operand was None (TypeError).
        `row` maps every known name to its value, None for a missing one.
        """
        if isinstance(error, KeyError):
            return True
        lacks_operand = any(row[name] is None for name in self._used_names)
        return isinstance(error, TypeError) and lacks_operand

    def _parse(self) -> ast.expr:
        """Parse the expression, check every part of it, and return its syntax tree.

        Raises UserError BAD_ARGUMENT if the expression is too long, cannot be parsed, or uses
        something that is not on the allow-list.
        """
        if len(self.expression) > LONGEST:
            raise self._error(f"is longer than {LONGEST} characters")
        try:
            tree = ast.parse(self.expression, mode="eval")
        # ValueError: there is a NUL byte, or a number with too many digits. RecursionError,
        # MemoryError: it is nested too deeply.
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or "it cannot be parsed"
            raise self._error(f"is no expression: {reason}") from None
        for node in ast.walk(tree):
            self._check_node(node)
        return tree.body

    def _check_node(self, node: ast.AST) -> None:
        """Raise UserError BAD_ARGUMENT unless a node of the syntax tree is allowed.

        The type of the node must be one of `_NODES`. In addition a constant must be plain, a call
        must be one of `_FUNCTIONS` without keywords, an index must follow a name, and a name must
        be known.
        """
        if not isinstance(node, _NODES):
            raise self._error(f"uses {type(node).__name__}, which is not available")
        if isinstance(node, ast.Constant) and not _is_plain(node):
            raise self._error(f"uses the value {node.value!r}, which is not available")
        if isinstance(node, ast.Call) and not _is_plain_call(node):
            raise self._error(f"calls something other than {', '.join(_FUNCTIONS)}")
        if isinstance(node, ast.Subscript) and not isinstance(node.value, ast.Name):
            raise self._error('may use [...] only as metrics["name"]')
        if isinstance(node, ast.Name):
            self._check_name(node.id)

    def _check_name(self, name: str) -> None:
        """Raise UserError BAD_ARGUMENT, which suggests the most similar name, if `name` is
        unknown."""
        if name in self._known_names | {*_WORDS, *_FUNCTIONS}:
            return
        similar = difflib.get_close_matches(name, sorted(self._known_names), n=1)
        suggestion = f"; did you mean {similar[0]!r}?" if similar else ""
        raise self._error(f"uses the unknown name {name!r}{suggestion}")

    def _error(self, fault: str) -> UserError:
        """Make the error BAD_ARGUMENT about the expression.

        `fault` is the predicate of the message, such as "divides by zero" in
        `where 'reward / 0' divides by zero`.
        """
        return UserError(
            "BAD_ARGUMENT",
            f"{self.field} {self.shown[:_SHOWN_CHARS]!r} {fault}",
            hint=f"Names: {', '.join(sorted(self._known_names))}. Example: {self.example}.",
            field=self.field,
        )
