"""Environments whose tools are those of an MCP server. The model gets a row's question, may call
the tools, and its last message is scored against the row's answer.

The server runs in the environment's sandbox and speaks over its standard streams. Each rollout has
a server of its own, so that no state passes from one rollout to another.
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
    """The options of [adapter] for this format.

    Attributes:
        server: the program of the server and its arguments, run in the folder.
        scorer: how the last message is compared with the row's answer: "exact", "number" or "f1".
        shared: whether all rollouts use one server; for servers without a state.
        data: the file with the rows; "" for every data file.
    """

    server: tuple[str, ...] = ()
    scorer: str = "exact"
    shared: bool = False
    data: str = ""


@dataclass
class State:
    """One rollout.

    Attributes:
        server: its MCP server; None until a tool is called.
        text: the text of the model's last message.
        calls, failed: how many tools were called, and how many of these calls failed.
    """

    server: McpServer | None = None
    text: str = ""
    calls: int = 0
    failed: int = field(default=0)


class McpTools(MultiTurnEnv):
    """Rows to be answered with the help of an MCP server's tools."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Start a server to read its tools; keep it only if all rollouts share it."""
        self.folder = folder
        self.options = options
        server = self._start_server()
        self.tools = server.tools()
        self.shared_server = server if options.shared else None
        if self.shared_server is None:
            server.close()

    def tasks(self) -> list[Task]:
        """Return the rows as tasks; each needs an answer."""
        data_file = self.options.data
        files = [self.folder / data_file] if data_file else data_files(self.folder)
        return read_tasks(*files, require_answer=True)

    def start(self, task: Task) -> State:
        """Begin a rollout. Its server starts with the first call of a tool, unless it is shared."""
        return State(self.shared_server)

    def step(self, state: State, completion: Message) -> list[Message] | None:
        """Return the results of the called tools; None (the rollout is over) if the message calls
        none."""
        state.text = completion.content
        if not completion.tool_calls:
            return None
        return [self._call_tool(state, call) for call in completion.tool_calls]

    def score(self, task: Task, state: State) -> Score:
        """Score the last message, and end the rollout's own server."""
        if state.server is not None and state.server is not self.shared_server:
            state.server.close()
        reward = SCORERS[self.options.scorer](state.text, task.answer_text)
        metrics = {"tool_calls": float(state.calls), "failed_calls": float(state.failed)}
        return Score(reward, success=reward == 1.0, metrics=metrics)

    def _call_tool(self, state: State, call: ToolCall) -> Message:
        """Call a tool, starting the server if necessary; return its result as a tool message."""
        if state.server is None:
            state.server = self._start_server()
        state.calls += 1
        text, has_failed = state.server.call(call.name, call.arguments or {})
        state.failed += has_failed
        return Message("tool", text, tool_call_id=call.id, name=call.name)

    def _start_server(self) -> McpServer:
        """Start the MCP server that the options name, in the environment's folder."""
        return McpServer(self.options.server, self.folder)


def load(folder: Path, adapter: Adapter, params: JsonObject) -> McpTools:
    """Load the rows and the server of a folder. Raises EnvProblem ENV_INVALID for a wrong
    option."""
    options = read_options(adapter, Options)
    if not options.server or options.scorer not in SCORERS:
        message = f"[adapter] needs a server, and a scorer of {', '.join(SCORERS)}"
        raise EnvProblem("ENV_INVALID", message, hint='server = ["python3", "server.py"]')
    return McpTools(folder, options)
