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
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from envs.base import Score
from envs.code_tests import code
from envs.json_schema import schema_errors
from envs.json_types import refuse_constant

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

LONGEST_NUMBER = 60  # characters; no real answer is longer, and huge numbers take long to parse
ANSWER_MARK = re.compile(r"####|<answer>|\banswer\s*(?:is\b\s*:?|:)", re.IGNORECASE)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)


def combine(
    parts: Mapping[str, tuple[float, float]],
    *,
    require: Sequence[str] = (),
    success_at: float = 1.0,
) -> Score:
    """Combine named parts into a score. The reward is their weighted mean, or 0 if a required part
    is below 1.

    Args:
        parts: name -> (weight, value from 0 to 1), at least one; the values become metrics.
        require: names of parts that must be 1; if one is lower the reward is 0. If names are given,
            the task counts as solved exactly if all of these parts are 1.
        success_at: the reward from which the task counts as solved; used only if `require` is
            empty.

    Raises ValueError if a weight is not above 0, if a required name is not a part, or if there are
    no parts.
    """
    _check_parts(parts, require)
    metrics = {name: float(value) for name, (_weight, value) in parts.items()}
    required_met = all(metrics[name] >= 1.0 for name in require)
    reward = _weighted_mean(parts.values())
    if not required_met:
        reward = 0.0
    success = required_met if require else reward >= success_at
    failed = [name for name in require if metrics[name] < 1.0]
    reason = f"required and not met: {', '.join(failed)}" if failed else ""
    return Score(reward, success=success, metrics=metrics, reason=reason, parts=dict(parts))


def _check_parts(parts: Mapping[str, tuple[float, float]], require: Sequence[str]) -> None:
    """Raise ValueError if a weight is not above 0, if a required name is not a part, or if there
    are no parts."""
    requires_unknown = any(name not in parts for name in require)
    has_low_weight = any(weight <= 0 for weight, _value in parts.values())
    if requires_unknown or has_low_weight or not parts:
        raise ValueError(f"parts need weights above 0 and the required names {list(require)}")


def _weighted_mean(weighted_values: Collection[tuple[float, float]]) -> float:
    """Return the weighted mean of (weight, value) pairs; there must be at least one."""
    total_weight = math.fsum(weight for weight, _value in weighted_values)
    return math.fsum(weight * value for weight, value in weighted_values) / total_weight


def final_answer(completion: str) -> str:
    """Return the part of a completion that is its answer, stripped of white space.

    An answer mark is `####`, `Answer:`, `the answer is` or `<answer>`. The answer is the content of
    the last `\\boxed{}` if no mark follows that box, else the text after the last mark. A
    completion without mark and box is an answer as a whole.
    """
    marks = list(ANSWER_MARK.finditer(completion))
    mark_end = marks[-1].end() if marks else 0
    box_start = completion.rfind("\\boxed{")  # -1 if there is none
    if box_start >= mark_end:
        boxed = _inside_braces(completion, box_start + len("\\boxed{"))
        if boxed is not None:
            return boxed.strip()
    answer = completion[mark_end:]
    if marks and marks[-1].group().lower() == "<answer>":
        answer, _, _ = answer.partition("</answer>")
    return answer.strip()


def exact(completion: str, expected: str, *, ignore_case: bool = False) -> float:
    """Return 1 if the completion equals `expected`, else 0.

    White space at the ends and its amount between words are ignored.
    """
    actual, target = " ".join(completion.split()), " ".join(str(expected).split())
    if ignore_case:
        actual, target = actual.casefold(), target.casefold()
    return float(actual == target)


def number(completion: str, expected: Any, *, tolerance: float = 0.0) -> float:
    """Return 1 if the final answer is a number equal to `expected`, else 0.

    `tolerance` is the allowed difference relative to `expected`: 0.01 allows 1 %, 0 none. Raises
    ValueError if `expected` is not a number.
    """
    target = parse_number(str(expected))
    if target is None:
        raise ValueError(f"expected is no number: {expected!r}")
    actual = parse_number(final_answer(completion))
    if actual is None:
        return 0.0
    if tolerance <= 0:
        return float(actual == target)
    # A relative tolerance allows nothing around 0, so an `expected` near 0 counts as this large.
    least_size = Fraction(1, 10**9)
    return float(abs(actual - target) <= Fraction(tolerance) * max(abs(target), least_size))


def parse_number(text: str) -> Fraction | None:
    """Read `text` as one number, such as "1,200", "-3.5", "3/4", "$7" or "12%".

    Currency and percent signs are ignored: 12% is 12. Returns None if the text is longer than
    LONGEST_NUMBER, divides by 0 or is not a number.
    """
    without_stop = text.strip().rstrip(".").strip()  # without the full stop of a sentence
    without_unit = without_stop.strip("$€£% ").strip()
    if len(without_unit) > LONGEST_NUMBER:
        return None
    fraction = re.fullmatch(r"([-+]?\d{1,20})\s*/\s*(\d{1,20})", without_unit)
    if fraction:
        numerator, denominator = int(fraction[1]), int(fraction[2])
        return Fraction(numerator, denominator) if denominator else None
    if not NUMBER.fullmatch(without_unit):
        return None
    return Fraction(without_unit.replace(",", ""))


def last_number(text: str) -> int | float | None:
    """Return the last number in `text`, an int if it has neither point nor exponent; None if the
    text contains no number.

    Do not use this as a scorer, because "it is not 7" ends with 7 too; use `number`.
    """
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    last = numbers[-1].replace(",", "")
    # int() refuses thousands of digits; float() makes infinity of them.
    is_short_integer = re.fullmatch(r"[-+]?\d{1,300}", last) is not None
    return int(last) if is_short_integer else float(last)


def choice(completion: str, expected: str, options: str | Mapping[str, str] = "ABCD") -> float:
    """Return 1 if the final answer to a multiple choice question is the letter `expected`, else 0.

    `options` are the letters ("ABCD"), or a dict from letter to option text. "B", "(b)" and "B."
    all mean the letter B. With a dict, "B) its text" and the text alone are accepted too. Case does
    not matter.
    """
    answer = final_answer(completion).strip()
    letters = re.escape("".join(options))
    # A letter alone, possibly in brackets or followed by a punctuation mark.
    lone_letter = re.fullmatch(rf"[(\[]?([{letters}])[)\].:]?", answer, re.IGNORECASE)
    if lone_letter:
        return float(lone_letter.group(1).casefold() == expected.casefold())
    if not isinstance(options, Mapping):  # the texts of the options are not known
        return 0.0
    return float(_is_option(answer, expected, str(options[expected])))


def _is_option(answer: str, letter: str, option: str) -> bool:
    """Whether an answer is the text of an option, possibly after the option's letter, as in "b)
    red".

    Case, white space and a full stop at the end do not matter.
    """
    # Lower case like the two texts below; casefold changes nothing in this pattern but the letter.
    letter_prefix = rf"(?:[(\[]?{re.escape(letter)}[)\].:]\s*)?".casefold()
    option_text = " ".join(option.split()).casefold().rstrip(".")
    answer_text = " ".join(answer.split()).casefold().rstrip(".")
    return re.fullmatch(letter_prefix + re.escape(option_text), answer_text) is not None


def regex(completion: str, pattern: str, expected: str | None = None) -> float:
    """Return 1 if `pattern` matches the whole completion, stripped of white space, else 0.

    If `expected` is given, the pattern's first group (or the whole match, if the pattern has no
    group) must also equal that text.
    """
    match = re.fullmatch(pattern, completion.strip(), re.DOTALL)
    if match is None:
        return 0.0
    if expected is None:
        return 1.0
    matched_text = match.group(1) if match.re.groups else match.group()
    return float(matched_text == expected)


def json_value(completion: str) -> Any:
    """Parse a completion that is JSON and nothing else, either plain or as one fenced block.

    Raises ValueError if the completion is not such JSON, holds NaN or infinity, or is nested too
    deep.
    """
    text = completion.strip()
    fenced_blocks = FENCE.findall(text)
    # Only a block that is the whole completion: text around it would hide other answers.
    is_one_block = len(fenced_blocks) == 1 and text.startswith("```") and text.endswith("```")
    if is_one_block:
        text = fenced_blocks[0]
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def json_schema(completion: str, schema: Mapping[str, Any]) -> float:
    """Return 1 if the completion is JSON that fits `schema`, else 0.

    Raises ValueError if the schema uses a keyword that `envs.json_schema` does not know (noticed
    only if the completion is JSON).
    """
    try:
        value = json_value(completion)
    except ValueError:
        return 0.0
    return float(not schema_errors(value, schema))


def f1(completion: str, expected: str) -> float:
    """Return the F1 score of the words: the harmonic mean of precision and recall.

    This is the word overlap of SQuAD (Rajpurkar et al. 2016); articles, case and punctuation are
    ignored. It rewards partial answers and therefore hedging: combine it with a stricter part. It
    is 0 if one of the two texts has no words, and 1 if both have none.
    """
    actual, target = _words(completion), _words(expected)
    if not actual or not target:
        return float(actual == target)
    common_count = sum((Counter(actual) & Counter(target)).values())
    if not common_count:
        return 0.0
    precision, recall = common_count / len(actual), common_count / len(target)
    return 2 * precision * recall / (precision + recall)


def length(completion: str, *, at_most: int, at_least: int = 0, unit: str = "words") -> float:
    """Reward the length of the completion, counted in `unit` ("words" or "characters").

    The reward is 1 for a length from `at_least` to `at_most`. Outside, it falls linearly to 0 at
    twice `at_most` and at half of `at_least`. Raises ValueError for another unit, or unless 0 <=
    at_least <= at_most and at_most >= 1.
    """
    if unit not in ("words", "characters"):
        raise ValueError(f"unit is words or characters, got {unit!r}")
    if at_most < 1 or not 0 <= at_least <= at_most:
        raise ValueError(f"0 <= at_least <= at_most, 1 <= at_most; got {at_least} and {at_most}")
    size = len(completion.split()) if unit == "words" else len(completion)
    if size > at_most:
        return max(0.0, 2.0 - size / at_most)  # 1 at `at_most`, 0 at twice that
    if size < at_least:
        return max(0.0, 2.0 * size / at_least - 1.0)  # 1 at `at_least`, 0 at half of that
    return 1.0


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without articles and punctuation."""
    plain = re.sub(r"[^\w\s]", " ", text.casefold())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _inside_braces(text: str, start: int) -> str | None:
    """Return the content of a pair of braces; `start` is the position behind the opening brace.

    Returns None if the brace is never closed. If words follow the closing brace, returns all text
    from `start` on, including that brace and the words: they may be a second answer, so the content
    of the braces alone must not be accepted.
    """
    depth = 1
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            words_follow = re.search(r"\w", text[position + 1 :])
            return text[start:] if words_follow else text[start:position]
    return None
