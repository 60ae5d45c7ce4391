"""Scorers to combine. Each takes a completion and gives a number from 0 to 1.

They read the *final answer* strictly: an answer that is denied, listed among others or followed by
another one is not paid, because a policy would learn to write just that.

    right = number(completion, task.answer)
    short = length(completion, at_most=50)
    return combine({"right": (0.9, right), "short": (0.1, short)}, require=("right",))
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from envs.base import Score
from envs.code_tests import code
from envs.json_schema import schema_errors

__all__ = [
    "choice",
    "code",
    "combine",
    "exact",
    "f1",
    "final_answer",
    "json_schema",
    "json_value",
    "last_number",
    "length",
    "number",
    "parse_number",
    "regex",
    "schema_errors",
]

ANSWER_MARK = re.compile(r"####|<answer>|\banswer\s*(?:is\b\s*:?|:)", re.IGNORECASE)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)


def combine(
    parts: Mapping[str, tuple[float, float]],
    *,
    require: Sequence[str] = (),
    success_at: float = 1.0,
) -> Score:
    """A score from named parts.

    Args:
        parts: name -> (weight, value from 0 to 1); the values become metrics.
        require: parts without which nothing is paid: below 1 the reward is 0.
        success_at: the reward at which the task counts as solved, used where nothing is required.

    The reward is the weighted mean. Raises ValueError for a weight that is not above 0 or a name
    that is not a part.
    """
    unknown = [name for name in require if name not in parts]
    if unknown or not parts or any(weight <= 0 for weight, _ in parts.values()):
        raise ValueError(f"parts need weights above 0 and the required names {list(require)}")
    metrics = {name: float(value) for name, (_, value) in parts.items()}
    held = all(metrics[name] >= 1.0 for name in require)
    total = math.fsum(weight for weight, _ in parts.values())
    reward = math.fsum(weight * value for weight, value in parts.values()) / total
    if not held:
        reward = 0.0
    return Score(reward, success=held if require else reward >= success_at, metrics=metrics)


def final_answer(completion: str) -> str:
    """What stands after the last `####`, `Answer:`, `the answer is`, `<answer>` or in the last
    `\\boxed{}`; the whole completion where there is none of them. Stripped."""
    marks = list(ANSWER_MARK.finditer(completion))
    start = marks[-1].end() if marks else 0
    boxed = completion.rfind("\\boxed{")
    if boxed >= start:
        inside = _braced(completion, boxed + len("\\boxed{"))
        if inside is not None:
            return inside.strip()
    tail = completion[start:]
    if marks and marks[-1].group().lower() == "<answer>":
        tail = tail.partition("</answer>")[0]
    return tail.strip()


def exact(completion: str, expected: str, *, ignore_case: bool = False) -> float:
    """1 when the completion is `expected`, white space at the ends and runs of it aside."""
    given, wanted = " ".join(completion.split()), " ".join(str(expected).split())
    if ignore_case:
        given, wanted = given.casefold(), wanted.casefold()
    return float(given == wanted)


def number(completion: str, expected: Any, *, tolerance: float = 0.0) -> float:
    """1 when the final answer is one number within `tolerance` (relative) of `expected`.

    Raises ValueError when `expected` is no number.
    """
    wanted = parse_number(str(expected))
    if wanted is None:
        raise ValueError(f"expected is no number: {expected!r}")
    given = parse_number(final_answer(completion))
    if given is None:
        return 0.0
    if tolerance <= 0:
        return float(given == wanted)
    return float(abs(given - wanted) <= Fraction(tolerance) * max(abs(wanted), Fraction(1, 10**9)))


def parse_number(text: str) -> Fraction | None:
    """The number that `text` is as a whole: 1,200 or -3.5 or 3/4 or $7 or 12%; else None."""
    plain = text.strip().rstrip(".").strip().strip("$€£% ").strip()
    if len(plain) > 60:
        return None
    over = re.fullmatch(r"([-+]?\d{1,20})\s*/\s*(\d{1,20})", plain)
    if over:
        return Fraction(int(over[1]), int(over[2])) if int(over[2]) else None
    if not NUMBER.fullmatch(plain):
        return None
    return Fraction(plain.replace(",", ""))


def last_number(text: str) -> int | float | None:
    """The last number in `text`, None without one.

    A reader, not a scorer: "it is not 7" ends with 7, too. Prefer `number`.
    """
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    plain = numbers[-1].replace(",", "")
    return int(plain) if re.fullmatch(r"[-+]?\d{1,300}", plain) else float(plain)


def choice(completion: str, expected: str, options: str | Mapping[str, str] = "ABCD") -> float:
    """1 when the final answer is the letter `expected`: B, (b), B. or, where `options` maps
    letters to texts, `B) text` or the text alone."""
    given = final_answer(completion).strip()
    letters = "".join(options)
    match = re.fullmatch(rf"[(\[]?([{re.escape(letters)}])[)\].:]?", given, re.IGNORECASE)
    if match:
        return float(match.group(1).casefold() == expected.casefold())
    if isinstance(options, Mapping):
        wanted = " ".join(str(options[expected]).split()).casefold()
        prefix = rf"(?:[(\[]?{re.escape(expected)}[)\].:]\s*)?"
        text = " ".join(given.split()).casefold().rstrip(".")
        return float(
            re.fullmatch(prefix.casefold() + re.escape(wanted.rstrip(".")), text) is not None
        )
    return 0.0


def regex(completion: str, pattern: str, expected: str | None = None) -> float:
    """1 when `pattern` matches the whole completion, ends stripped; with `expected`, when its
    first group (or the whole match) is that."""
    match = re.fullmatch(pattern, completion.strip(), re.DOTALL)
    if match is None or expected is None:
        return float(match is not None)
    return float((match.group(1) if match.re.groups else match.group()) == expected)


def json_value(completion: str) -> Any:
    """The JSON value a completion is, alone or in one fenced block. Raises ValueError."""
    text = completion.strip()
    blocks = FENCE.findall(text)
    if len(blocks) == 1 and text.startswith("```") and text.endswith("```"):
        text = blocks[0]
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def json_schema(completion: str, schema: Mapping[str, Any]) -> float:
    """1 when the completion is JSON that `schema` allows. See `envs.json_schema` for the subset."""
    try:
        value = json_value(completion)
    except ValueError:
        return 0.0
    return float(not schema_errors(value, schema))


def f1(completion: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words, articles and punctuation aside.

    The word overlap of SQuAD (Rajpurkar et al. 2016). It pays for parts, so it pays hedging: use
    it beside a stricter part.
    """
    given, wanted = _words(completion), _words(expected)
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def length(completion: str, *, at_most: int, at_least: int = 0, unit: str = "words") -> float:
    """1 inside the bounds, falling to 0 at twice the upper one and at half the lower one.

    `unit` is words or characters.
    """
    if unit not in ("words", "characters"):
        raise ValueError(f"unit is words or characters, got {unit!r}")
    if at_most < 1 or not 0 <= at_least <= at_most:
        raise ValueError(f"0 <= at_least <= at_most, 1 <= at_most; got {at_least} and {at_most}")
    size = len(completion.split()) if unit == "words" else len(completion)
    if size > at_most:
        return max(0.0, 2.0 - size / at_most)
    if size < at_least:
        return max(0.0, 2.0 * size / at_least - 1.0)
    return 1.0


def _words(text: str) -> list[str]:
    plain = re.sub(r"[^\w\s]", " ", text.casefold())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            # Anything but punctuation after the box would be another answer.
            return (
                text[start:position] if not re.search(r"\w", text[position + 1 :]) else text[start:]
            )
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
