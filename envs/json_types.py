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
# What goes through the pipe: `op`, `id` and the operation's arguments; the answer to that `id`.
Request = dict[str, Any]
Reply = dict[str, Any]


class EnvDescription(TypedDict):
    """What an environment is: its `kind` (single, multi, command or sft), whether it scores, its
    tools; `perturbs` where it words tasks in its own way (`Env.perturb`), `groups` where it scores
    the completions of a task together (`score_group`), `concurrent` where `score` is async."""

    kind: str
    scored: bool
    tools: list[ToolSchema]
    perturbs: NotRequired[bool]
    groups: NotRequired[bool]
    concurrent: NotRequired[bool]


class ScoreReply(TypedDict):
    """What one completion earned (see `Score`); `seconds` once it was measured, `timed_out` where
    the environment took longer than it may, `lost` where its process ended during the call;
    `reason` and `parts` (name -> [weight, value]) where the score has them."""

    reward: float
    success: bool | None
    metrics: dict[str, float]
    error: str | None
    seconds: NotRequired[float]
    timed_out: NotRequired[bool]
    lost: NotRequired[bool]
    reason: NotRequired[str]
    parts: NotRequired[dict[str, list[float]]]
