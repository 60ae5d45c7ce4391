"""One exchange with a task of verifiers 0.4: the trace that its hooks, rewards and metrics read.

Verifiers runs a harness in a runtime and records what it asked. Here the replies come from outside;
the trace gets the same nodes, and the task's hooks the same arguments in the same order: `setup`,
the replies, `finalize`, `score`.
"""

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from envs.base import Message
from envs.json_types import JsonObject

T = TypeVar("T")
MODEL = "policy"  # as which the model stands in a trace


def module(name: str = "") -> Any:
    """The module `name` of `verifiers.v1`, or that package itself."""
    return importlib.import_module(f"verifiers.v1.{name}" if name else "verifiers.v1")


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop for the whole life of a process: what the foreign code opens in it stays open."""
    return asyncio.new_event_loop()


def run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run the loop until `work` is done; what it returns."""
    return loop.run_until_complete(work)


def opening(task: Any) -> list[Any]:
    """The foreign messages before the first reply: system prompt and prompt, as a harness without
    tools sends them."""
    v1, data = module(), task.data
    system = [] if data.system_prompt is None else [v1.SystemMessage(content=data.system_prompt)]
    if data.prompt is None:
        return system
    if isinstance(data.prompt, str):
        return [*system, v1.UserMessage(content=data.prompt)]
    return [*system, *data.prompt]


def as_message(foreign: Any) -> Message:
    """A foreign message as ours. Raises ValueError for content that is not text."""
    content = foreign.content
    if not isinstance(content, str | None):
        content = [part.model_dump() for part in content]
    calls = [
        {"id": call.id, "name": call.name, "arguments": call.arguments}
        for call in getattr(foreign, "tool_calls", None) or []
    ]
    return Message.from_dict(
        {
            "role": foreign.role,
            "content": content,
            "tool_calls": calls,
            "tool_call_id": getattr(foreign, "tool_call_id", ""),
            "name": getattr(foreign, "name", ""),
        }
    )


class Exchange:
    """One agent's conversation about a task.

    Args:
        task: the foreign task.
        config: the agent's `AgentConfig`; None for one that says nothing.
        name: its role.

    Attributes:
        trace: what has been said, and once `finish` is done what it earned.
    """

    def __init__(self, task: Any, config: Any = None, name: str = "agent") -> None:
        v1 = module()
        self.task = task
        self.runtime: Any = None
        self._prompt: list[Any] = []
        self.trace = v1.Trace(
            task=v1.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            state=module("state").state_cls(type(task))(),
            agent=v1.AgentInfo(
                config=config or v1.AgentConfig(runtime=v1.SubprocessConfig()), name=name
            ),
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """A context in which the task is set up: its hooks run programs in a folder of their own,
        which ends with it."""
        self.runtime = module("runtimes").make_runtime(
            module().SubprocessConfig(), name=self.trace.id
        )
        self.runtime.env = dict(self.task.runtime_env())
        self.trace.agent.runtime = self.runtime.info
        await self.runtime.start()
        try:
            await self._called(self.task.setup)
            yield
        finally:
            await self.runtime.stop()

    def messages_of(self, messages: Sequence[Message]) -> list[Any]:
        """Messages of ours as foreign ones."""
        v1 = module()
        kinds = {
            "system": v1.SystemMessage,
            "user": v1.UserMessage,
            "assistant": v1.AssistantMessage,
            "tool": v1.ToolMessage,
        }
        made = []
        for message in messages:
            fields: JsonObject = {"content": message.content}
            if message.tool_calls:
                calls = [call.to_dict() for call in message.tool_calls]
                fields["tool_calls"] = [
                    {"id": each.get("id", ""), **each["function"]} for each in calls
                ]
            if message.role == "tool":
                fields |= {"tool_call_id": message.tool_call_id, "name": message.name or None}
            made.append(kinds[message.role](**fields))
        return made

    def ask(self, messages: Sequence[Any]) -> None:
        """Add foreign messages to what the model has read."""
        self._prompt += messages

    def commit(self, text: str) -> Any:
        """Record the model's reply to all that was asked; the foreign message it is."""
        v1 = module()
        reply = v1.AssistantMessage(content=text)
        turn = module("graph").prepare_turn(self.trace, list(self._prompt))
        node = turn.commit(
            v1.Response(
                id=f"reply-{self.trace.num_turns}",
                created=int(time.time()),
                model=MODEL,
                message=reply,
                finish_reason="stop",
            )
        )
        self.trace.calls.append(v1.ModelCall(node=node, model=MODEL, finish_reason="stop"))
        self._prompt.append(reply)
        return reply

    async def finish(self, condition: str) -> None:
        """The task's `finalize` and its scores, once the exchange has ended by `condition`."""
        self.trace.stop(condition)
        await self._called(self.task.finalize)
        await self.task.score(self.trace, self.runtime)
        self.trace.is_completed = self.trace.ok = True

    async def _called(self, hook: Any) -> None:
        """Call a hook of the task with the arguments that it names."""
        available = {"trace": self.trace, "runtime": self.runtime}
        await module("utils.decorators").invoke(hook, available)
