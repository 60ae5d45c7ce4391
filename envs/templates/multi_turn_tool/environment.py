"""The model calls a tool, reads what it returns, and answers.

The rates are random per task, so an answer without the call cannot be right. To make it yours:
change `tools`, `step` (what a call returns) and `score`.
"""

import random
from dataclasses import dataclass

from envs import Message, MultiTurnEnv, Score, Task, ToolCall
from envs.rewards import number

CURRENCIES = ("crowns", "dollars", "euros", "francs", "pesos", "pounds", "rupees", "yen")


@dataclass
class Talk:
    """The state of one conversation: what is asked for, and what the model has done so far."""

    currency: str
    rate: int
    asked: bool = False
    answer: str = ""
    turns: int = 0


class Exchange(MultiTurnEnv):
    """`rows` questions about exchange rates."""

    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_rate",
                "description": "How many coins one unit of a currency buys.",
                "parameters": {
                    "type": "object",
                    "properties": {"currency": {"type": "string"}},
                    "required": ["currency"],
                },
            },
        }
    ]

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.seed = seed

    def tasks(self) -> list[Task]:
        """Questions with a random rate each; the reference answer calls the tool, then multiplies."""
        rng = random.Random(self.seed)
        questions = [(amount, name) for amount in range(2, 202) for name in CURRENCIES]
        tasks = []
        for amount, currency in rng.sample(questions, self.rows):
            rate = rng.randint(2, 30)
            call = ToolCall("get_rate", {"currency": currency}, id="call_1")
            tasks.append(
                Task(
                    id=f"{amount}-{currency}",
                    prompt=f"How many coins do {amount} {currency} buy? Look the rate up.",
                    answer=[
                        Message("assistant", tool_calls=[call]),
                        Message("assistant", f"Answer: {amount * rate}"),
                    ],
                    metadata={"amount": amount, "currency": currency, "rate": rate},
                )
            )
        return tasks

    def start(self, task: Task) -> Talk:
        """A conversation in which nothing was asked yet."""
        return Talk(task.metadata["currency"], task.metadata["rate"])

    def step(self, state: Talk, completion: Message) -> list[Message] | None:
        """One tool message per call: the rate, or an error text for a wrong call.

        A message without a call is the answer and ends the conversation, as does the fourth turn.
        """
        state.turns += 1
        if not completion.tool_calls or state.turns > 3:
            state.answer = completion.content
            return None
        replies = []
        for call in completion.tool_calls:
            right_call = call.name == "get_rate" and call.arguments == {"currency": state.currency}
            state.asked = state.asked or right_call
            content = str(state.rate) if right_call else "unknown currency or tool"
            replies.append(Message("tool", content, tool_call_id=call.id, name=call.name))
        return replies

    def score(self, task: Task, state: Talk) -> Score:
        """1 for the right answer after the right call, 0.2 for the right call alone, else 0."""
        expected = task.metadata["amount"] * task.metadata["rate"]
        right = state.asked and number(state.answer, expected) == 1.0
        return Score(
            # The right call is worth something, so that a beginner's groups differ.
            reward=1.0 if right else 0.2 if state.asked else 0.0,
            success=right,
            metrics={"asked": float(state.asked), "turns": float(state.turns)},
        )


def load_environment(rows: int = 1000, seed: int = 1) -> Exchange:
    """Its arguments are set in environment.toml."""
    return Exchange(rows, seed)
