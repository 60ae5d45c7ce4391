"""The tools of an MCP server as the tools of an environment: rows with answers are asked, the model
may call the tools, and its last message is scored.

The server runs beside the environment, in its box, and speaks over its standard streams. Each
rollout has a server of its own, so nothing that one leaves in it reaches another.
"""

from dataclasses import dataclass, field
from pathlib import Path

from envs import rewards
from envs.adapters.parts.mcp_stdio import McpServer
from envs.adapters.parts.options import read_options
from envs.base import Message, MultiTurnEnv, Score, Task, ToolCall
from envs.config.adapters import Adapter
from envs.config.problem import EnvProblem
from envs.dataset import data_files, read_tasks
from envs.json_types import JsonObject

SCORERS = {"exact": rewards.exact, "number": rewards.number, "f1": rewards.f1}


@dataclass(frozen=True)
class Options:
    """What runs and what scores.

    Attributes:
        server: the program of the server and its arguments, run in the folder.
        scorer: "exact", "number" or "f1": the last message against the row's answer.
        shared: one server for all rollouts, for servers without a state.
        data: the file with the rows; "" for every data file.
    """

    server: tuple[str, ...] = ()
    scorer: str = "exact"
    shared: bool = False
    data: str = ""


@dataclass
class State:
    """One rollout: its server, once a tool was called, its last text, and the calls so far."""

    server: McpServer | None = None
    text: str = ""
    calls: int = 0
    failed: int = field(default=0)


class McpTools(MultiTurnEnv):
    """Rows to be answered with the help of a server's tools."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.options = options
        first = self._started()
        self.tools = first.tools()
        self.common = first if options.shared else None
        if self.common is None:
            first.close()

    def tasks(self) -> list[Task]:
        """The rows; each needs an answer."""
        named = self.options.data
        files = [self.folder / named] if named else data_files(self.folder)
        return read_tasks(*files, require_answer=True)

    def start(self, task: Task) -> State:
        """A rollout; its server starts with the first call of a tool."""
        return State(self.common)

    def step(self, state: State, completion: Message) -> list[Message] | None:
        """What the called tools return; None where the message calls none."""
        state.text = completion.content
        if not completion.tool_calls:
            return None
        return [self._called(state, call) for call in completion.tool_calls]

    def score(self, task: Task, state: State) -> Score:
        """The scorer's number for the last message."""
        if state.server is not None and state.server is not self.common:
            state.server.close()
        reward = SCORERS[self.options.scorer](state.text, task.answer_text)
        metrics = {"tool_calls": float(state.calls), "failed_calls": float(state.failed)}
        return Score(reward, success=reward == 1.0, metrics=metrics)

    def _called(self, state: State, call: ToolCall) -> Message:
        if state.server is None:
            state.server = self._started()
        state.calls += 1
        text, has_failed = state.server.call(call.name, call.arguments or {})
        state.failed += has_failed
        return Message("tool", text, tool_call_id=call.id, name=call.name)

    def _started(self) -> McpServer:
        return McpServer(self.options.server, self.folder)


def load(folder: Path, adapter: Adapter, params: JsonObject) -> McpTools:
    """The rows and the server of a folder. Raises EnvProblem ENV_INVALID for a wrong option."""
    options = read_options(adapter, Options)
    if not options.server or options.scorer not in SCORERS:
        message = f"[adapter] needs a server, and a scorer of {', '.join(SCORERS)}"
        raise EnvProblem("ENV_INVALID", message, hint='server = ["python3", "server.py"]')
    return McpTools(folder, options)
