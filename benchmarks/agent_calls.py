"""How many calls and characters a whole task takes a client that follows `next` alone, and whether
it ends with the goal reached or with the honest word.

    .venv/bin/python -m benchmarks.agent_calls                # all tasks, calls of 45 s
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
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

MOST_CALLS, MOST_CHARS = 20, 40_000
EXAMPLES = Path(__file__).parents[1] / "envs" / "examples"
OWN = Path(__file__).parent / "survey_envs"
SFT = {"steps": 40, "eval_rows": 40, "learning_rate": 3e-3}
GRPO = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "eval_rows": 40}
EVALUATION = {"algorithm": "evaluate", "rows": 60}
_ENDS = ("deploy", "chat")  # tools at which a task is over
_LOOKS = ("read_rollouts", "diagnose", "read_playbook")  # each is followed once


@dataclass(frozen=True)
class Step:
    """A call that the client made, and the text of its result."""

    tool: str
    text: str
    refused: bool = False


@dataclass(frozen=True)
class Task:
    """An environment, the plan that a client has for it, and what it must have been told.

    Attributes:
        kind: of task, as in the survey.
        env: the folder of the environment.
        first: algorithm and settings of the first step of the plan.
        then: its later steps.
        vary: what is varied in it.
        goal: whether the steps of the client show the goal reached, or the honest word.
    """

    kind: str
    env: Path
    goal: Callable[[Sequence[Step]], bool]
    first: Mapping[str, Any] = field(default_factory=lambda: {"algorithm": "sft", "settings": SFT})
    then: Sequence[Mapping[str, Any]] = ()
    vary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What a task took.

    Attributes:
        waits: those of its calls that waited.
        characters: of the arguments and the results.
        outcome: the state of the plan, and a verdict for each step.
        reached: whether the goal was reached, or the honest word was given.
    """

    calls: int
    waits: int
    characters: int
    seconds: float
    outcome: str
    reached: bool


def grpo(**changes: object) -> Mapping[str, Any]:
    """A step of GRPO."""
    return {"algorithm": "grpo", "settings": {**GRPO, **changes}}


def sft(**changes: object) -> Mapping[str, Any]:
    """A step of SFT with these settings, the others being the defaults."""
    return {"algorithm": "sft", "settings": changes}


def compared(steps: Sequence[Step]) -> str:
    """The verdict of the last comparison; "" where nothing was compared."""
    texts = [step.text for step in steps if step.tool == "compare_runs" and not step.refused]
    return str(json.loads(texts[-1])["verdict"]) if texts else ""


def got_better(steps: Sequence[Step]) -> bool:
    """The goal of a task that can be learned."""
    return compared(steps) == "better"


def not_better(steps: Sequence[Step]) -> bool:
    """The honest word on a task that cannot be learned, or was not."""
    return compared(steps) in ("no_difference", "inconclusive", "worse")


def told_before_training(*words: str) -> Callable[[Sequence[Step]], bool]:
    """The honest word on a plan with a fault: one of the words, before anything is trained."""

    def goal(steps: Sequence[Step]) -> bool:
        before = list(itertools.takewhile(lambda step: step.tool != "wait_run", steps))
        return any(word in step.text for step in before for word in words)

    return goal


def better_but_forgot(steps: Sequence[Step]) -> bool:
    """The honest word on a model that learned and lost what it could do before."""
    return got_better(steps) and any("Forgotten" in step.text for step in steps)


def nowhere(steps: Sequence[Step]) -> bool:
    """The honest word on a run that gets nowhere: no gain, and why."""
    texts = [step.text for step in steps if step.tool == "diagnose"]
    return not_better(steps) and any(word in texts[-1] for word in WHY) if texts else False


WHY = ("uniform", "too_hard", "no_signal")
TASKS = [
    Task("chain", EXAMPLES / "arithmetic", got_better, then=[grpo(), EVALUATION]),
    Task("seeds", EXAMPLES / "arithmetic", got_better, then=[EVALUATION], vary={"seed": [1, 2]}),
    Task(
        "sweep",
        EXAMPLES / "arithmetic",
        got_better,
        then=[EVALUATION],
        vary={"learning_rate": [1e-3, 3e-3]},
    ),
    Task("tool", EXAMPLES / "tool_call", got_better, then=[EVALUATION]),
    Task("tool, chain", EXAMPLES / "tool_call", got_better, then=[grpo(), EVALUATION]),
    Task("format", OWN / "brackets", got_better, sft(steps=120, keep=0.2), [EVALUATION]),
    Task("forgetting", OWN / "brackets", better_but_forgot, sft(steps=160, keep=0.0), [EVALUATION]),
    Task("gamed reward", OWN / "gamed", told_before_training("REWARD_RISK", '"risk"'), grpo()),
    Task("impossible", OWN / "impossible", not_better, sft(steps=40), [EVALUATION]),
    Task("leaking data", OWN / "leaking", told_before_training("overlap"), sft(steps=30)),
    Task("gets nowhere", OWN / "nowhere", nowhere, grpo(steps=8), [EVALUATION]),
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
        self.steps: list[Step] = []
        self.characters = 0

    async def carry_out(self, task: Task) -> Cost:
        """Carry out a task from push to comparison; returns what it took."""
        reply = await self.call("push_env", {"path": str(task.env)})
        last_plan: Mapping[str, Any] = {}
        while (call := self._next_call(reply)) is not None:
            tool, arguments = call["tool"], dict(call["arguments"])
            if tool == "dry_run" and tool not in self.calls:
                arguments |= task.first
            if tool == "submit_train":
                arguments |= {"then": list(task.then), "vary": dict(task.vary)}
            reply = await self.call(tool, arguments)
            if reply.get("kind") == "plan":
                last_plan = reply
        return self._cost(task, last_plan)

    def _next_call(self, reply: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The first call that a reply suggests and that is whole and no second look. None at the
        end of the task: where a model is served, where the next move would be another training, and
        where what refused a call suggests it again."""
        for call in reply["next"]:
            tool = call["tool"]
            trains_again = tool == "submit_train" and tool in self.calls
            is_refused_again = self.steps[-1].refused and self.calls[-1] == tool
            if tool in _ENDS or trains_again or is_refused_again:
                return None
            if not call.get("needs") and (tool not in _LOOKS or tool not in self.calls):
                return call
        return None

    def _cost(self, task: Task, last_plan: Mapping[str, Any]) -> Cost:
        """What the calls took, and what came of them."""
        steps = last_plan.get("steps", [])
        verdicts = ", ".join(step.get("verdict", step["state"]) for step in steps)
        return Cost(
            calls=len(self.calls),
            waits=self.calls.count("wait_run"),
            characters=self.characters,
            seconds=time.monotonic() - self._began,
            outcome=f"{last_plan.get('state', 'no plan')}: {verdicts}",
            reached=task.goal(self.steps),
        )

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make one call and return its result; of a call that is refused the one that its hint
        suggests as `next`. Raises RuntimeError where the task takes more than twice the calls that
        it may."""
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
        self.steps.append(Step(tool, text, bool(result.is_error)))
        if result.is_error:
            remedy = json.loads(text).get("call")
            return {"next": [remedy] if remedy else []}
        return result.structured_content or {"next": []}  # a section of the playbook is prose


async def _heard(progress: float, total: float | None, message: str | None) -> None:
    """A client that takes progress; what it is told is not needed here."""


async def measure(task: Task, hold_s: float, *, show: bool = False) -> Cost:
    """Carry out one task in a home of its own; `show` writes its calls and results to stderr."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        argv = ["-P", "-m", "mcp_server.cli", "serve", "--home", folder]
        argv += ["--root", str(task.env.parent)]
        server = StdioServerParameters(
            command=sys.executable, args=argv, env=dict(os.environ), cwd=str(task.env.parent)
        )
        async with Client(server) as client:
            follower = Follower(client, hold_s)
            try:
                return await follower.carry_out(task)
            finally:
                for step in follower.steps if show else ():
                    print(f"--- {step.tool}\n{step.text}", file=sys.stderr)


def chosen(text: str) -> list[int]:
    """The places of the tasks that "3" or "0-4" names; all for ""."""
    if not text:
        return list(range(len(TASKS)))
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> int:
    """Print a row for each task; exit status 1 where one takes more than it may, or ends without
    its goal and without the honest word."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", default="", help="places of the tasks, such as 0-2")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds that a wait is kept alive")
    parser.add_argument("--show", action="store_true", help="also the calls and results, to stderr")
    options = parser.parse_args()
    print("| task | runs | calls | of them waits | characters | seconds | outcome | goal or word |")
    print("|---|---|---|---|---|---|---|---|")
    within = True
    for place in chosen(options.only):
        task = TASKS[place]
        cost = asyncio.run(measure(task, options.hold, show=options.show))
        within &= cost.calls <= MOST_CALLS and cost.characters <= MOST_CHARS and cost.reached
        algorithms = [task.first["algorithm"], *(step["algorithm"] for step in task.then)]
        varied = "".join(f" x {name} {values}" for name, values in task.vary.items())
        print(
            f"| {task.kind} | {' -> '.join(algorithms)}{varied} | {cost.calls} | {cost.waits} | "
            f"{cost.characters:,} | {cost.seconds:.0f} | {cost.outcome} | "
            f"{'yes' if cost.reached else 'NO'} |",
            flush=True,
        )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
