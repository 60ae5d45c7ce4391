"""JSON objects that pass between an env process, its client and the stored versions, by name; and
the strict reading of JSON, which refuses what `json` lets pass.

Their values are the environment's own, so they stay plain JSON; each is checked where it enters
(`envs/host/process.py`). Standard library only.
"""

import json
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


def parse_strictly(text: str) -> Any:
    """Parse JSON. Raises ValueError for bad JSON, a repeated key, NaN or infinity."""
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse_constant)


def unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Return the object with these (key, value) pairs. Raises ValueError if a key occurs twice.

    The JSON decoder calls this for each object (`object_pairs_hook`).
    """
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated_key = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated_key!r} occurs twice")
    return row


def refuse_constant(name: str) -> Any:
    """Raise ValueError. The JSON decoder calls this for NaN and the infinities
    (`parse_constant`)."""
    raise ValueError(f"{name} is no JSON number")
