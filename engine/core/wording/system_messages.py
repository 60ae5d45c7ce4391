"""Changes the system message of a prompt: another one, none, or one more sentence in it.

A system message may say how to answer, so its text is kept. Only one that says no more than "You
are a helpful assistant" is replaced or left out.
"""

import random
import re

from engine.core.wording.kinds import Stock
from envs.json_types import ChatMessage

_NEUTRAL: dict[Stock, tuple[str, ...]] = {
    "training": (
        "You are a helpful assistant.",
        "You are an assistant.",
        "You answer the questions of users.",
        "A user talks to you.",
        "You are a friendly and careful assistant.",
    ),
    "probe": (
        "You are a knowledgeable assistant.",
        "You are an AI model that helps people.",
        "The user will ask you something.",
        "You are a useful assistant in a chat.",
    ),
}
_SAYS_NOTHING = re.compile(
    r"You are (?:an? )?(?:(?:very )?(?:helpful|friendly|careful|kind|useful|honest|harmless|AI|"
    r"smart|knowledgeable|polite)(?:,| and)? )*assistant\.?",
    re.IGNORECASE,
)


def with_other_system(
    prompt: list[ChatMessage], rng: random.Random, stock: Stock
) -> list[ChatMessage]:
    """Return a copy of the prompt with another system message, drawn with `rng`.

    The result always differs from `prompt`, which must have at least one message. `stock` says
    which list of neutral sentences may be used.

    - A prompt without a system message gets a neutral one ("You are an assistant.").
    - A neutral system message is replaced by another, or, in half of the cases, left out.
    - Any other system message stays, with a neutral sentence before or after it.
    """
    first, later_messages = prompt[0], prompt[1:]
    if first["role"] != "system":
        return [{"role": "system", "content": rng.choice(_NEUTRAL[stock])}, *prompt]
    text = str(first["content"]).strip()
    new_sentence = rng.choice([sentence for sentence in _NEUTRAL[stock] if sentence not in text])
    is_neutral = _SAYS_NOTHING.fullmatch(text) is not None
    if not is_neutral:
        is_before = rng.random() < 0.5
        parts = [new_sentence, text] if is_before else [text, new_sentence]
        return [{**first, "content": "\n".join(parts)}, *later_messages]
    # A prompt that is only a system message keeps one, because no prompt may be empty.
    if later_messages and rng.random() < 0.5:
        return later_messages
    return [{**first, "content": new_sentence}, *later_messages]
