"""JSON objects that pass between an env process, its client and the stored versions, by name.

Their values are the environment's own, so they stay plain JSON; each is checked where it enters
(`envs/host/process.py`). Standard library only.
"""

from typing import Any, NotRequired, TypedDict

# A JSON object that somebody else gives a shape: a row of a data file, metadata of a task,
# arguments of a tool, params of an environment.
JsonObject = dict[str, Any]
# id, prompt (messages), answer (messages or None), split, metadata, and tools where the task has
# its own; stored also with gold, the whole conversation with the reference answer (or None).
TaskRow = dict[str, Any]
# role, content, tool_calls, tool_call_id, name, and whatever else a chat template reads.
ChatMessage = dict[str, Any]
# An OpenAI function schema.
ToolSchema = dict[str, Any]
# What goes through the pipe. A request: `op` (the operation), `id` and the operation's arguments.
# A reply: the same `id` and the result.
Request = dict[str, Any]
Reply = dict[str, Any]


class EnvDescription(TypedDict):
    """What an environment is: its `kind` (single, multi, command or sft), whether it is `scored`,
    and its `tools`.

    The optional keys: `perturbs` if the environment rewords tasks itself (`Env.perturb`), `groups`
    if it scores all completions of a task together (`score_group`), `concurrent` if `score` is
    async.
    """

    kind: str
    scored: bool
    tools: list[ToolSchema]
    perturbs: NotRequired[bool]
    groups: NotRequired[bool]
    concurrent: NotRequired[bool]


class ScoreReply(TypedDict):
    """The score of one completion as it passes through the pipe (see `Score`).

    The optional keys: `seconds` if the time was measured, `timed_out` if the environment exceeded
    its time limit, `lost` if its process ended during the call, `reason` and `parts` (name ->
    [weight, value]) if the score has them.
    """

    reward: float
    success: bool | None
    metrics: dict[str, float]
    error: str | None
    seconds: NotRequired[float]
    timed_out: NotRequired[bool]
    lost: NotRequired[bool]
    reason: NotRequired[str]
    parts: NotRequired[dict[str, list[float]]]
