"""How many calls and characters a whole task takes a client that follows `next` alone.

    .venv/bin/python -m benchmarks.agent_calls                # ten tasks, calls of 45 s
    .venv/bin/python -m benchmarks.agent_calls --hold 600     # a client that keeps a call alive
    .venv/bin/python -m benchmarks.agent_calls --only 0-2

Each task is a real server over stdio, real trainers and a plan: the environment is pushed, the call
that `next` suggests is made (a dry run), then the one that it suggests (a submit, to which the
client adds the steps of its plan), and so on until `next` leads to no further call. A suggestion
that reads answers is followed once, and one that serves a model is the end. Characters are those of
the arguments and of the results, as compact JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

MOST_CALLS, MOST_CHARS = 20, 40_000
EXAMPLES = Path(__file__).parents[1] / "envs" / "examples"
SFT = {"steps": 12, "eval_rows": 40, "learning_rate": 3e-3}
GRPO = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "eval_rows": 40}
EVALUATION = {"algorithm": "evaluate", "rows": 60}
_ENDS = ("deploy", "chat")  # tools at which a task is over


@dataclass(frozen=True)
class Task:
    """An environment of `envs/examples`, and the plan that a client has for it."""

    env: str
    then: Sequence[Mapping[str, Any]] = ()
    vary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What a task took.

    Attributes:
        waits: those of its calls that waited.
        characters: of the arguments and the results.
        outcome: the state of the plan, and a verdict for each step.
    """

    calls: int
    waits: int
    characters: int
    seconds: float
    outcome: str


def grpo(**changes: object) -> Mapping[str, Any]:
    """A step of GRPO."""
    return {"algorithm": "grpo", "settings": {**GRPO, **changes}}


TASKS = [
    Task("arithmetic", [grpo(), EVALUATION]),
    Task("arithmetic", [EVALUATION], {"seed": [1, 2]}),
    Task("arithmetic", [EVALUATION], {"learning_rate": [1e-3, 3e-3]}),
    Task("tool_call", [EVALUATION]),
    Task("tool_call", [grpo(), EVALUATION]),
    Task("tool_call", [EVALUATION], {"seed": [1, 2]}),
    Task("booking_fields", [EVALUATION]),
    Task("guess_number", [grpo()]),
    Task("sft_only", [{"algorithm": "sft", "settings": {"steps": 6}}]),
    Task("arithmetic", [grpo(), grpo(steps=2), EVALUATION], {"seed": [3, 4]}),
]


class Follower:
    """A client that makes the calls that `next` suggests, and counts what they take.

    Args:
        hold_s: how long it keeps a waiting call alive; 0 for a client that takes no progress.
    """

    def __init__(self, client: Client, hold_s: float) -> None:
        self._client = client
        self._hold_s = hold_s
        self._began = time.monotonic()
        self.calls: list[str] = []
        self.characters = 0

    async def carry_out(self, task: Task) -> Cost:
        """Carry out a task from push to comparison; returns what it took."""
        reply = await self.call("push_env", {"path": task.env})
        plan = {"algorithm": "sft", "settings": SFT if task.env != "sft_only" else {"steps": 12}}
        last_plan: Mapping[str, Any] = {}
        while reply["next"]:
            tool, arguments = reply["next"][0]["tool"], dict(reply["next"][0]["arguments"])
            if tool in _ENDS or (tool == "read_rollouts" and tool in self.calls):
                break
            if tool == "dry_run":
                arguments |= plan
            if tool == "submit_train":
                arguments |= {"then": list(task.then), "vary": dict(task.vary)}
            reply = await self.call(tool, arguments)
            if reply.get("kind") == "plan":
                last_plan = reply
        seconds = time.monotonic() - self._began
        steps = last_plan.get("steps", [])
        verdicts = ", ".join(step.get("verdict", step["state"]) for step in steps)
        outcome = f"{last_plan.get('state', 'none')}: {verdicts}"
        waits = self.calls.count("wait_run")
        return Cost(len(self.calls), waits, self.characters, seconds, outcome)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make one call and return its result. Raises RuntimeError where it is refused, and where
        the task takes more than twice the calls that it may."""
        given = dict(arguments)
        callback = None
        if tool == "wait_run" and self._hold_s:
            given["timeout_s"] = self._hold_s
            callback = _heard
        self.calls.append(tool)
        if len(self.calls) > 2 * MOST_CALLS:
            raise RuntimeError(f"{len(self.calls)} calls: {self.calls}")
        result = await self._client.call_tool(tool, given, progress_callback=callback)
        text = "".join(getattr(part, "text", "") for part in result.content)
        self.characters += len(text) + len(json.dumps(given, separators=(",", ":")))
        if result.is_error or result.structured_content is None:
            raise RuntimeError(f"{tool}: {text}")
        return result.structured_content


async def _heard(*_: object) -> None:
    """A client that takes progress; what it is told is not needed here."""


async def measure(task: Task, hold_s: float) -> Cost:
    """Carry out one task in a home of its own."""
    with tempfile.TemporaryDirectory() as folder:
        argv = ["-P", "-m", "mcp_server.cli", "serve", "--home", folder, "--root", str(EXAMPLES)]
        server = StdioServerParameters(
            command=sys.executable, args=argv, env=dict(os.environ), cwd=str(EXAMPLES)
        )
        async with Client(server) as client:
            return await Follower(client, hold_s).carry_out(task)


def chosen(text: str) -> list[int]:
    """The places of the tasks that "3" or "0-4" names; all for ""."""
    if not text:
        return list(range(len(TASKS)))
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> int:
    """Print a row for each task; exit status 1 where one takes more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="places of the tasks, such as 0-2")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds that a wait is kept alive")
    options = parser.parse_args()
    print("| task | runs | calls | of them waits | characters | seconds | outcome |")
    print("|---|---|---|---|---|---|---|")
    within = True
    for place in chosen(options.only):
        task = TASKS[place]
        cost = asyncio.run(measure(task, options.hold))
        within &= cost.calls <= MOST_CALLS and cost.characters <= MOST_CHARS
        steps = " -> ".join(["sft", *(step["algorithm"] for step in task.then)])
        varied = "".join(f" x {name} {values}" for name, values in task.vary.items())
        print(
            f"| {task.env} | {steps}{varied} | {cost.calls} | {cost.waits} | {cost.characters:,} | "
            f"{cost.seconds:.0f} | {cost.outcome} |",
            flush=True,
        )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
