"""One exchange with a task of verifiers 0.4, and its trace, which the task's hooks, rewards and
metrics read.

Verifiers itself runs a harness in a runtime and records what that asked. Here the replies come from
outside, but the trace gets the same nodes, and the task's hooks the same arguments in the same
order: `setup`, the replies, `finalize`, `score`.
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
MODEL = "policy"  # the model's name in a trace


def module(name: str = "") -> Any:
    """Import the module `name` of `verifiers.v1`; with "" that package itself."""
    return importlib.import_module(f"verifiers.v1.{name}" if name else "verifiers.v1")


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for the whole life of a process: what the foreign code opens in it stays
    open."""
    return asyncio.new_event_loop()


def run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run the loop until `work` is done, and return its result."""
    return loop.run_until_complete(work)


def opening(task: Any) -> list[Any]:
    """Return the foreign messages before the first reply: system prompt and prompt, as a harness
    without tools sends them."""
    v1, data = module(), task.data
    system = [] if data.system_prompt is None else [v1.SystemMessage(content=data.system_prompt)]
    if data.prompt is None:
        return system
    if isinstance(data.prompt, str):
        return [*system, v1.UserMessage(content=data.prompt)]
    return [*system, *data.prompt]


def as_message(foreign: Any) -> Message:
    """Return a foreign message as `Message`. Raises ValueError if its content is not text."""
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
        config: the agent's `AgentConfig`; None for an empty one.
        name: the agent's role.

    Attributes:
        trace: what has been said and, once `finish` is done, what it earned.
    """

    def __init__(self, task: Any, config: Any = None, name: str = "agent") -> None:
        """Begin an empty trace."""
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
        """A context in which the task is set up: its hooks may run programs in a temporary folder
        of their own."""
        self.runtime = module("runtimes").make_runtime(
            module().SubprocessConfig(), name=self.trace.id
        )
        self.runtime.env = dict(self.task.runtime_env())
        self.trace.agent.runtime = self.runtime.info
        await self.runtime.start()
        try:
            await self._call_hook(self.task.setup)
            yield
        finally:
            await self.runtime.stop()

    def messages_of(self, messages: Sequence[Message]) -> list[Any]:
        """Return `Message` objects as foreign messages."""
        v1 = module()
        kinds = {
            "system": v1.SystemMessage,
            "user": v1.UserMessage,
            "assistant": v1.AssistantMessage,
            "tool": v1.ToolMessage,
        }
        foreign_messages = []
        for message in messages:
            fields: JsonObject = {"content": message.content}
            if message.tool_calls:
                calls = [call.to_dict() for call in message.tool_calls]
                fields["tool_calls"] = [
                    {"id": call.get("id", ""), **call["function"]} for call in calls
                ]
            if message.role == "tool":
                fields |= {"tool_call_id": message.tool_call_id, "name": message.name or None}
            foreign_messages.append(kinds[message.role](**fields))
        return foreign_messages

    def ask(self, messages: Sequence[Any]) -> None:
        """Add foreign messages to what the model must answer."""
        self._prompt += messages

    def commit(self, text: str) -> Any:
        """Record the model's reply to everything asked so far; return it as a foreign message."""
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
        """Run the task's `finalize` and score the trace; `condition` says why the exchange
        ended."""
        self.trace.stop(condition)
        await self._call_hook(self.task.finalize)
        await self.task.score(self.trace, self.runtime)
        self.trace.is_completed = self.trace.ok = True

    async def _call_hook(self, hook: Any) -> None:
        """Call a hook of the task with those of (trace, runtime) that its parameters name."""
        available = {"trace": self.trace, "runtime": self.runtime}
        await module("utils.decorators").invoke(hook, available)
