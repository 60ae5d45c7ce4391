"""A client side that declares the tasks extension, and keeps the tasks it is given."""

from collections.abc import Sequence
from typing import Any, Literal

from mcp import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.types import CallToolResult, Result
from pydantic import Field

from mcp_server.protocol.tasks import TASKS


class TaskResult(Result):
    """What the wire says instead of a result."""

    result_type: Literal["task"] = Field(alias="resultType")
    task_id: str = Field(alias="taskId")
    status: str
    status_message: str = Field("", alias="statusMessage")
    created_at: str = Field(alias="createdAt")
    last_updated_at: str = Field(alias="lastUpdatedAt")
    ttl_ms: int | None = Field(alias="ttlMs")
    poll_interval_ms: int = Field(alias="pollIntervalMs")


class Taker(ClientExtension):
    """A client side that keeps the tasks it is given and answers their calls with a marker."""

    identifier = TASKS

    def __init__(self) -> None:
        self.taken: list[TaskResult] = []

    def claims(self) -> Sequence[ResultClaim[TaskResult]]:
        return [ResultClaim(result_type="task", model=TaskResult, resolve=self._keep)]

    async def _keep(self, task: TaskResult, context: ClaimContext) -> CallToolResult:
        self.taken.append(task)
        head = {"summary": "taken", "next": [], "warnings": []}
        return CallToolResult(content=[], structured_content=head)


async def ask(client: Client, method: str, task_id: str) -> dict[str, Any]:
    """The answer to `tasks/get`, `tasks/cancel` or `tasks/update`."""
    from mcp.types import Request, RequestParams

    class Params(RequestParams):
        task_id: str = Field(serialization_alias="taskId")

    class Answer(Result, extra="allow"):
        pass

    request = Request[Params, str](method=method, params=Params(task_id=task_id))
    answer = await client.session.send_request(request, Answer)
    return answer.model_dump(by_alias=True, mode="json")
