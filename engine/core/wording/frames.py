"""Changes the text around the question of a prompt: a sentence before it, the case of its first
word, the place of its last instruction. The question itself stays.

Nothing is ever added after a prompt, because its end may be the text to work on. A first word is
changed only if it is a common word of questions and instructions.
"""

import random
import re
from collections.abc import Callable

from engine.core.wording.kinds import Stock

_OPENINGS: dict[Stock, tuple[str, ...]] = {
    "training": (
        "Please answer this.",
        "Here is a question for you.",
        "Could you help me with this?",
        "I have a task for you.",
        "Question:",
        "A quick one:",
        "Hi there!",
        "Next one, please.",
    ),
    "probe": (
        "Please help me with the following.",
        "I would like to ask you something.",
        "Hello! Can you do this?",
        "Task:",
        "Kindly take care of this one.",
        "Let us go on.",
    ),
}
_QUESTION_WORDS = "what which who whose where when why how".split()
_FIRST_WORDS = frozenset(
    (
        "what which who whose where when why how is are was were do does did can could will would "
        "add subtract multiply divide compute calculate find give write name list tell say show "
        "explain answer classify decide translate convert count sort choose pick select solve "
        "complete read look the"
    ).split()
)
# A last sentence that begins with one of these words says how to answer.
_INSTRUCTION = re.compile(
    r"(?:Answer|Reply|Respond|End|Finish|Give|Write|Return|Output|Use|Only|Show|State)\b"
)
# A sentence with one of these words may refer to the text before it, so it cannot move.
_POINTS_BACK = re.compile(
    r"\b(?:it|its|this|that|these|those|them|they|above|below|following|previous|then|so|also|"
    r"former|latter|otherwise|instead|first|last)\b",
    re.IGNORECASE,
)
_SECOND_EDIT = 0.3  # probability of each edit other than the one that is drawn
_LAST_SENTENCE = re.compile(r"(?P<before>.*[.?!])(?P<gap>\s+)(?P<last>[A-Z][^\n]*[.!])", re.DOTALL)


def reframe_text(text: str, rng: random.Random, stock: Stock) -> str:
    """Change the text of a prompt by one or more edits; the result always differs from `text`.

    The edits are: an opening sentence from the list `stock`, a first letter in lower case, the last
    instruction first. One edit that changes the text is drawn and made; each other one is made with
    probability `_SECOND_EDIT`.
    """
    # An opening always changes the text; the other two edits count only if they do.
    edits: list[Callable[[str], str]] = [lambda prompt: _with_opening(prompt, rng, stock)]
    edits += [edit for edit in (_lower_first, _instruction_first) if edit(text) != text]
    certain_edit = rng.choice(edits)
    # The edits are made in reverse order, so that the opening is added last: the others look for
    # the question's first word.
    for edit in reversed(edits):
        if edit is certain_edit or rng.random() < _SECOND_EDIT:
            text = edit(text)
    return text


def _with_opening(text: str, rng: random.Random, stock: Stock) -> str:
    """Put a random opening sentence such as "Hi there!" before the text; `stock` names the list of
    these sentences."""
    opening = rng.choice(_OPENINGS[stock])
    separator = rng.choice((" ", "\n", "\n\n"))
    return opening + separator + text


def _lower_first(text: str) -> str:
    """Return the text with its first letter in lower case, if its first word is one of
    `_FIRST_WORDS` (common words of questions and instructions); otherwise return it unchanged.

    A text that is a single question also loses its question mark.
    """
    first_word = text.partition(" ")[0].lower()
    if first_word not in _FIRST_WORDS:
        return text
    lowered = text[:1].lower() + text[1:]
    is_one_line = "\n" not in text
    is_one_sentence = re.fullmatch(r"[^.?!]*\?", text) is not None
    if first_word in _QUESTION_WORDS and is_one_line and is_one_sentence:
        return lowered.removesuffix("?")
    return lowered


def _instruction_first(text: str) -> str:
    """Move the last sentence of a prompt to its beginning, if that sentence says how to answer and
    does not refer to the text before it; otherwise return the text unchanged."""
    match = _LAST_SENTENCE.fullmatch(text)
    if match is None:
        return text
    last = match["last"]
    says_how_to_answer = _INSTRUCTION.match(last) is not None
    needs_what_precedes = _POINTS_BACK.search(last) is not None
    # The pattern may have matched several sentences as the last one. Then nothing is moved.
    is_single = re.search(r"[.?!]\s", last) is None
    if not says_how_to_answer or needs_what_precedes or not is_single:
        return text
    return last + match["gap"] + match["before"]
