"""Descriptions of tools in other words and another order. Names, types and what is required stay,
so that the same call is right.
"""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from engine.wording.kinds import Stock
from envs.json_types import JsonObject, ToolSchema

# "{text}" is the description with a small first letter, "{name}" the function's name, "{words}" its
# name as words.
_FRAMES: dict[Stock, tuple[str, ...]] = {
    "training": (
        "Use this for: {text}",
        "This function: {text}",
        "A tool. {text}",
        "{text} (a function)",
        "Purpose: {text}",
        "When a user asks for it, this function can be called to help. In short: {text}",
        "{text} Give every argument that is required, and nothing else.",
        "Part of the tools of this assistant, kept by another team. {text}",
    ),
    "probe": (
        "What it does: {text}",
        "Call this when needed. {text}",
        "{text} Use it if it helps.",
        "One of the functions that you can reach while you talk to somebody; {text}",
        "{text} The result comes back as text, which may be shown to whoever asked.",
    ),
}
_GENERIC: dict[Stock, tuple[str, ...]] = {
    "training": (
        "",
        "The function {name}.",
        "A function to call: {words}.",
        "{name}",
        "A function of this assistant, called {name}, for requests that it fits.",
    ),
    "probe": (
        "Does what its name says: {words}.",
        "Tool {name}.",
        "Runs {name} for you.",
        "Reach for {name} whenever somebody wants to know what it can tell.",
    ),
}
# What is said of a parameter: "{name}" is the parameter's.
_PARAMETERS: dict[Stock, tuple[str, ...]] = {
    "training": ("Value of {name}.", "{name} to use", "The argument {name}."),
    "probe": ("The {name} that was asked about.", "{name}, as the user gave it."),
}
# A word of descriptions, and another for each stock.
_SYNONYMS: dict[str, tuple[str, str]] = {
    "get": ("fetch", "retrieve"),
    "gets": ("fetches", "retrieves"),
    "find": ("locate", "look up"),
    "finds": ("locates", "looks up"),
    "search": ("look through", "query"),
    "return": ("give", "hand back"),
    "returns": ("gives", "hands back"),
    "calculate": ("compute", "work out"),
    "compute": ("calculate", "work out"),
    "create": ("make", "set up"),
    "delete": ("remove", "erase"),
    "remove": ("delete", "take away"),
    "update": ("change", "modify"),
    "list": ("show", "enumerate"),
    "send": ("pass on", "dispatch"),
    "price": ("cost", "amount to pay"),
    "item": ("thing", "article"),
    "information": ("details", "facts"),
    "current": ("present", "latest"),
    "given": ("named", "specified"),
    "specified": ("given", "stated"),
}
_STOCKS: tuple[Stock, ...] = ("training", "probe")
_SENTENCES = re.compile(r"(?<=[.!?])\s+")


def with_other_texts(tools: list[ToolSchema], rng: random.Random, stock: Stock) -> list[ToolSchema]:
    """The tools with other descriptions, in another order where there are several. At least the
    description of one differs."""
    reworded = [_reworded(tool, rng, stock) for tool in tools]
    return rng.sample(reworded, len(reworded))


def _reworded(tool: ToolSchema, rng: random.Random, stock: Stock) -> ToolSchema:
    """One tool in other words; its fields stand where they stood."""
    function: JsonObject = dict(tool.get("function", tool))
    text = str(function.get("description") or "")
    other = _other_description(text, str(function.get("name", "")), rng, stock)
    function["description"] = other
    if isinstance(function.get("parameters"), Mapping):
        function["parameters"] = _other_parameters(function["parameters"], rng, stock)
    return {**tool, "function": function} if "function" in tool else function


def _other_description(text: str, name: str, rng: random.Random, stock: Stock) -> str:
    """Another description of the function `name`, whose own is `text`; it always differs."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[_.-]+", " ", name).strip().lower()
    others = [frame.format(name=name, words=words) for frame in _GENERIC[stock]]
    if text:
        plain = text[:1].lower() + text[1:]
        framed = [frame.replace("{text}", plain) for frame in _FRAMES[stock]]
        others += framed + _reordered(text, rng) + _with_synonyms(text, stock) * len(framed)
    return rng.choice([other for other in others if other != text])


def _reordered(text: str, rng: random.Random) -> list[str]:
    """The text with its sentences in another order, as a list of one; [] where it has only one."""
    sentences = _SENTENCES.split(text.strip())
    if len(set(sentences)) < 2:
        return []
    turned = rng.randrange(1, len(sentences))
    return [" ".join([*sentences[turned:], *sentences[:turned]])]


def _with_synonyms(text: str, stock: Stock) -> list[str]:
    """The text with other words for common ones, as a list of one; [] where it has none."""
    place = _STOCKS.index(stock)

    def other(match: re.Match[str]) -> str:
        """The other word, with a capital where the first had one."""
        word = match[0]
        synonym = _SYNONYMS[word.lower()][place]
        return synonym.capitalize() if word[0].isupper() else synonym

    pattern = rf"\b(?:{'|'.join(_SYNONYMS)})\b"
    changed = re.sub(pattern, other, text, flags=re.IGNORECASE)
    return [changed] if changed != text else []


def _other_parameters(
    parameters: Mapping[str, Any], rng: random.Random, stock: Stock
) -> JsonObject:
    """The schema of the parameters with its properties in another order and, two times of three,
    with other descriptions of them or without any."""
    schema: JsonObject = json.loads(json.dumps(parameters))
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    change = rng.choice(("keep", "leave out", "reword"))
    for name, each in properties.items():
        # A parameter that is itself called "description" is a property, not a text.
        if isinstance(each, dict) and change != "keep":
            each.pop("description", None)
            if change == "reword":
                each["description"] = rng.choice(_PARAMETERS[stock]).format(name=name)
    names = rng.sample(list(properties), len(properties))
    schema["properties"] = {name: properties[name] for name in names}
    return schema
