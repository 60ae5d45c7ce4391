"""The one tool that `llm` offers to the model."""

import json
import os


def lookup(item: str) -> str:
    """Price of an item."""
    with open(os.environ["HONESMITH_TASK"]) as file:
        asked_for = json.load(file)["metadata"]
    return str(asked_for["price"]) if item == asked_for["item"] else "There is no such item."
