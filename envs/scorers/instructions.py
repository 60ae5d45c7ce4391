"""Constraints on the form of a text, each of which code can decide.

instructions(completion, {"max_words": 50, "includes": ["delivery"], "bullets": 3})

min_words, max_words, min_sentences, max_sentences      counts, both ends included
bullets, paragraphs, lines                              exact counts (blank lines do not count)
includes, excludes                                      lists of texts; case is ignored
counts                                                  {"word": 2}: exact counts of whole words
starts_with, ends_with                                  a text; outer white space is ignored
case                                                    "lower" or "upper"
no_commas, is_json                                      true (or false for the opposite)
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S", re.MULTILINE)


def instructions(completion: str, constraints: Mapping[str, Any]) -> float:
    """Return the share of the constraints that the text satisfies.

    An empty text satisfies none, so that a model cannot meet "at most fifty words" by saying
    nothing. Raises ValueError for an unknown constraint, a value of the wrong type, or no
    constraints.
    """
    results = instruction_results(completion, constraints)
    return sum(results.values()) / len(results)


def instruction_results(completion: str, constraints: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each constraint, by name, whether the text satisfies it; all False for an empty
    text.

    Raises ValueError for an unknown constraint, a value of the wrong type, or no constraints.
    """
    if not constraints:
        raise ValueError("name at least one constraint")
    results: dict[str, bool] = {}
    for name, value in constraints.items():
        # A function (text, value) -> whether the text satisfies the constraint; the value's type.
        is_satisfied, value_type = _CONSTRAINTS.get(name, (None, None))
        if is_satisfied is None or value_type is None:
            raise ValueError(f"there is no constraint {name!r}; known: {', '.join(_CONSTRAINTS)}")
        is_bool_as_int = value_type is int and isinstance(value, bool)  # a bool is an int in Python
        if not isinstance(value, value_type) or is_bool_as_int:
            raise ValueError(f"the constraint {name} takes a {value_type.__name__}, got {value!r}")
        is_empty = not completion.strip()
        results[name] = not is_empty and is_satisfied(completion, value)
    return results


def _word_count(text: str) -> int:
    """Return how many words, separated by white space, a text has."""
    return len(text.split())


def _sentence_count(text: str) -> int:
    """Return how many sentences a text has.

    A sentence ends with . ! or ? before white space; a rest without such an end counts as one.
    """
    # Closing quotes and brackets may follow the end of a sentence.
    sentences = re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip())
    return len([sentence for sentence in sentences if sentence])


def _includes(text: str, wanted: list[str]) -> bool:
    """Whether the text contains every one of the `wanted` texts; case is ignored."""
    return all(part.casefold() in text.casefold() for part in wanted)


def _excludes(text: str, unwanted: list[str]) -> bool:
    """Whether the text contains none of the `unwanted` texts; case is ignored."""
    return not any(part.casefold() in text.casefold() for part in unwanted)


def _has_counts(text: str, counts: Mapping[str, int]) -> bool:
    """Whether each word occurs exactly as often as `counts` says, as a whole word in any case."""
    for word, count in counts.items():
        occurrences = re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
        if len(occurrences) != count:
            return False
    return True


def _has_case(text: str, case: str) -> bool:
    """Whether the text is all lower or all upper case. Raises ValueError if `case` is neither
    "lower" nor "upper"."""
    if case not in ("lower", "upper"):
        raise ValueError(f'case is "lower" or "upper", got {case!r}')
    converted = text.lower() if case == "lower" else text.upper()
    return text == converted


def _is_json(text: str, wanted: bool) -> bool:
    """Whether the text is JSON, if `wanted` is True; whether it is not JSON, if it is False."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or nested too deep
        return not wanted
    return wanted


_IsSatisfied = Callable[[str, Any], bool]
# Name of the constraint -> (whether a text satisfies it for a value, the type of that value).
_CONSTRAINTS: dict[str, tuple[_IsSatisfied, type]] = {
    "min_words": (lambda text, n: _word_count(text) >= n, int),
    "max_words": (lambda text, n: _word_count(text) <= n, int),
    "min_sentences": (lambda text, n: _sentence_count(text) >= n, int),
    "max_sentences": (lambda text, n: _sentence_count(text) <= n, int),
    "bullets": (lambda text, n: len(_BULLET.findall(text)) == n, int),
    "paragraphs": (lambda text, n: len(re.split(r"\n\s*\n", text.strip())) == n, int),
    "lines": (lambda text, n: sum(bool(line.strip()) for line in text.splitlines()) == n, int),
    "includes": (_includes, list),
    "excludes": (_excludes, list),
    "counts": (_has_counts, dict),
    "starts_with": (lambda text, part: text.strip().startswith(part.strip()), str),
    "ends_with": (lambda text, part: text.strip().endswith(part.strip()), str),
    "case": (_has_case, str),
    "no_commas": (lambda text, wanted: ("," not in text) is wanted, bool),
    "is_json": (_is_json, bool),
}
