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


def verifiers_module(name: str = "") -> Any:
    """Import the module `name` of `verifiers.v1`; with "" that package itself."""
    return importlib.import_module(f"verifiers.v1.{name}" if name else "verifiers.v1")


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, to be used for the whole life of a process: what the foreign code
    opens in it, such as a connection, stays open from one rollout to the next."""
    return asyncio.new_event_loop()


def run_in_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the loop until `coroutine` is done, and return its result."""
    return loop.run_until_complete(coroutine)


def opening_messages(task: Any) -> list[Any]:
    """Return the messages (of verifiers) that a model reads before its first reply: the task's
    system prompt and prompt, as far as it has them."""
    v1, data = verifiers_module(), task.data
    messages: list[Any] = []
    if data.system_prompt is not None:
        messages.append(v1.SystemMessage(content=data.system_prompt))
    if isinstance(data.prompt, str):
        messages.append(v1.UserMessage(content=data.prompt))
    elif data.prompt is not None:  # a list of messages
        messages += data.prompt
    return messages


def as_message(foreign: Any) -> Message:
    """Return a message of verifiers as a `Message` of ours. Raises ValueError if its content is not
    text."""
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
        """Begin an empty trace of a conversation about `task` (of verifiers).

        `config` is the agent's `AgentConfig`, None for an empty one; `name` is the agent's role.
        """
        v1 = verifiers_module()
        self.task = task
        self.runtime: Any = None
        self._prompt: list[Any] = []
        self.trace = v1.Trace(
            task=v1.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            state=verifiers_module("state").state_cls(type(task))(),
            agent=v1.AgentInfo(
                config=config or v1.AgentConfig(runtime=v1.SubprocessConfig()), name=name
            ),
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """A context in which the task is set up and has a runtime: its hooks may run programs in a
        temporary folder of their own."""
        self.runtime = verifiers_module("runtimes").make_runtime(
            verifiers_module().SubprocessConfig(), name=self.trace.id
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
        """Return messages of ours as messages of verifiers."""
        v1 = verifiers_module()
        class_of_role = {
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
            message_class = class_of_role[message.role]
            foreign_messages.append(message_class(**fields))
        return foreign_messages

    def ask(self, messages: Sequence[Any]) -> None:
        """Add messages (of verifiers) to the conversation, for the model to answer."""
        self._prompt += messages

    def commit(self, text: str) -> Any:
        """Record on the trace the text with which the model replied to everything asked so far;
        return it as a message of verifiers."""
        v1 = verifiers_module()
        reply = v1.AssistantMessage(content=text)
        turn = verifiers_module("graph").prepare_turn(self.trace, list(self._prompt))
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
        """End the conversation: run the task's `finalize` and score the trace.

        `condition` says why it ended, in a word of verifiers such as "agent_completed".
        """
        self.trace.stop(condition)
        await self._call_hook(self.task.finalize)
        await self.task.score(self.trace, self.runtime)
        self.trace.is_completed = self.trace.ok = True

    async def _call_hook(self, hook: Any) -> None:
        """Call a hook of the task, such as `setup`, with those of the arguments `trace` and
        `runtime` that its parameters name."""
        available = {"trace": self.trace, "runtime": self.runtime}
        await verifiers_module("utils.decorators").invoke(hook, available)
