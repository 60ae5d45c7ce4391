"""Rewrites descriptions of tools in other words and another order. Names, types and required
parameters stay, so that the same call is right."""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from engine.core.wording.kinds import Stock
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
# Descriptions of a parameter; "{name}" is the parameter's name.
_PARAMETERS: dict[Stock, tuple[str, ...]] = {
    "training": ("Value of {name}.", "{name} to use", "The argument {name}."),
    "probe": ("The {name} that was asked about.", "{name}, as the user gave it."),
}
# A word of descriptions, with its synonyms for the stocks "training" and "probe".
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
    """Return copies of the tools with other descriptions, in a random order.

    The description of every function differs from before; names, types and required parameters
    stay. `stock` names the lists of words that may be used.
    """
    reworded = [_reworded(tool, rng, stock) for tool in tools]
    return rng.sample(reworded, len(reworded))


def _reworded(tool: ToolSchema, rng: random.Random, stock: Stock) -> ToolSchema:
    """Return a copy of one tool with other descriptions of its function and parameters.

    The function may stand under the key "function" or be the whole schema; the copy has the same
    form.
    """
    function: JsonObject = dict(tool.get("function", tool))
    description = str(function.get("description") or "")
    name = str(function.get("name", ""))
    function["description"] = _other_description(description, name, rng, stock)
    if isinstance(function.get("parameters"), Mapping):
        function["parameters"] = _other_parameters(function["parameters"], rng, stock)
    return {**tool, "function": function} if "function" in tool else function


def _other_description(text: str, name: str, rng: random.Random, stock: Stock) -> str:
    """Draw a description of the function `name` that differs from `text`, its description so far.

    The choices are: generic sentences, `text` in a frame, its sentences in another order, and
    `text` with synonyms.
    """
    # "getUserName" and "get_user-name" both become "get user name".
    name_as_words = re.sub(r"(?<=[a-z])(?=[A-Z])|[_.-]+", " ", name).strip().lower()
    choices = [frame.format(name=name, words=name_as_words) for frame in _GENERIC[stock]]
    if text:
        lowered = text[:1].lower() + text[1:]
        framed = [frame.replace("{text}", lowered) for frame in _FRAMES[stock]]
        choices += framed + _reordered(text, rng)
        # Repeated, so that the text with synonyms is as likely as all frames together.
        choices += _with_synonyms(text, stock) * len(framed)
    return rng.choice([choice for choice in choices if choice != text])


def _reordered(text: str, rng: random.Random) -> list[str]:
    """Return a list with the text whose sentences are rotated by a random number of places; [] if
    the text has fewer than two different sentences."""
    sentences = _SENTENCES.split(text.strip())
    if len(set(sentences)) < 2:
        return []
    shift = rng.randrange(1, len(sentences))
    return [" ".join([*sentences[shift:], *sentences[:shift]])]


def _with_synonyms(text: str, stock: Stock) -> list[str]:
    """Return a list with the text in which every word of `_SYNONYMS` is replaced by its synonym for
    `stock`; [] if the text has no such word."""
    index_of_stock = _STOCKS.index(stock)  # each entry has one synonym per stock

    def synonym_of(match: re.Match[str]) -> str:
        """Return the synonym of the matched word, with a capital letter if the word has one."""
        word = match[0]
        synonym = _SYNONYMS[word.lower()][index_of_stock]
        return synonym.capitalize() if word[0].isupper() else synonym

    pattern = rf"\b(?:{'|'.join(_SYNONYMS)})\b"
    new_text = re.sub(pattern, synonym_of, text, flags=re.IGNORECASE)
    return [new_text] if new_text != text else []


def _other_parameters(
    parameters: Mapping[str, Any], rng: random.Random, stock: Stock
) -> JsonObject:
    """Return a copy of the JSON schema of a function's parameters with its properties in a random
    order.

    In a third of the cases each, the descriptions of all properties are kept, left out or replaced.
    A schema without properties is returned unchanged.
    """
    schema: JsonObject = json.loads(json.dumps(parameters))  # a deep copy
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    change = rng.choice(("keep", "leave out", "reword"))
    for name, property_schema in properties.items():
        if not isinstance(property_schema, dict) or change == "keep":
            continue
        property_schema.pop("description", None)
        if change == "reword":
            property_schema["description"] = rng.choice(_PARAMETERS[stock]).format(name=name)
    names = rng.sample(list(properties), len(properties))
    schema["properties"] = {name: properties[name] for name in names}
    return schema
