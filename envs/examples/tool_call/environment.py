"""Look something up with a tool, then answer with what it returned.

The model must call `lookup` with the right key and repeat the value. Guessing cannot pay: the
values are random per task. An untuned `pebble` manages about half of the tasks.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from envs import Message, MultiTurnEnv, Score, Task, ToolCall

ITEMS = (
    "apple bread candle drum egg fan glove hat ink jar kite lamp mug nail oven pen quilt rope "
    "soap tent urn vase wheel yarn zip anchor basket carpet desk engine flute guitar hammer iron "
    "jacket kettle ladder mirror needle orange pillow quiver rocket saddle table umbrella violin "
    "wallet xylophone yacht"
).split()


@dataclass
class Lookup:
    """The state of one conversation: what is looked up, and what the model has done so far."""

    value: int
    item: str
    called: bool = False
    right_call: bool = False
    answer: str = ""


class PriceLookup(MultiTurnEnv):
    """One tool, one call, one answer."""

    tools: ClassVar = [
        {
            "type": "function",
            "function": {
                "name": "lookup",
                "description": "Price of an item.",
                "parameters": {
                    "type": "object",
                    "properties": {"item": {"type": "string"}},
                    "required": ["item"],
                },
            },
        }
    ]

    def __init__(self, tasks_per_item: int, seed: int) -> None:
        self.tasks_per_item = tasks_per_item
        self.seed = seed

    def tasks(self) -> list[Task]:
        """`tasks_per_item` questions about each item; every third item is held out."""
        rng = random.Random(self.seed)
        tasks = []
        for number in range(self.tasks_per_item):
            for index, item in enumerate(ITEMS):
                value = rng.randint(10, 99)
                call = ToolCall("lookup", {"item": item}, id="call_1")
                tasks.append(
                    Task(
                        id=f"{item}-{number}",
                        prompt=f"What is the price of {'the ' if number % 2 else ''}{item}?",
                        answer=[
                            Message("assistant", "", tool_calls=[call]),
                            Message("assistant", str(value)),
                        ],
                        split="heldout" if index % 3 == 0 else "train",
                        metadata={"item": item, "value": value},
                    )
                )
        return tasks

    def start(self, task: Task) -> Lookup:
        """A conversation in which nothing was called yet."""
        return Lookup(task.metadata["value"], task.metadata["item"])

    def step(self, state: Lookup, completion: Message) -> list[Message] | None:
        """The tool's reply to the first call: the value, or "unknown" for a wrong call.

        A message without a call, or after the first one, is the answer and ends the conversation.
        """
        if not completion.tool_calls or state.called:
            state.answer = completion.content
            return None
        state.called = True
        call = completion.tool_calls[0]
        state.right_call = call.name == "lookup" and call.arguments == {"item": state.item}
        content = str(state.value) if state.right_call else "unknown"
        return [Message("tool", content, tool_call_id=call.id, name="lookup")]

    def score(self, task: Task, state: Lookup) -> Score:
        """1 for the right call and the right answer, 0.25 for the right call alone, else 0."""
        right = state.right_call and state.answer.strip() == str(state.value)
        return Score(
            reward=1.0 if right else 0.25 if state.right_call else 0.0,
            success=right,
            metrics={"called": float(state.called), "right_call": float(state.right_call)},
        )


def load_environment(tasks_per_item: int = 6, seed: int = 11) -> PriceLookup:
    """Fifty items, a third of them held out."""
    return PriceLookup(tasks_per_item, seed)
