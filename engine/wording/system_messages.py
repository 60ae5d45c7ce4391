"""Another system message, none, or one more sentence in it.

A system message may say how to answer, so its text is kept; only one that says no more than "You
are a helpful assistant" is replaced or left out.
"""

import random
import re

from engine.wording.kinds import Stock
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
    """The prompt with another system message, which always differs."""
    first, rest = prompt[0], prompt[1:]
    if first["role"] != "system":
        return [{"role": "system", "content": rng.choice(_NEUTRAL[stock])}, *prompt]
    text = str(first["content"]).strip()
    sentence = rng.choice([each for each in _NEUTRAL[stock] if each not in text])
    if not _SAYS_NOTHING.fullmatch(text):
        parts = [sentence, text] if rng.random() < 0.5 else [text, sentence]
        return [{**first, "content": "\n".join(parts)}, *rest]
    if rest and rng.random() < 0.5:
        return rest
    return [{**first, "content": sentence}, *rest]
