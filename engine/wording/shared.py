"""Texts that all rows of an environment share: a model trained on them may depend on their very
words. In one case 87 % became 4 % when only a tool's description changed."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from engine.wording.kinds import Kind
from envs.json_types import TaskRow, ToolSchema
from envs.tool_schemas import tools_of

_MOST_ROWS = 2_000  # that are looked at
_FEWEST_ROWS = 20  # fewer rows share their texts by nature


@dataclass(frozen=True)
class SharedTexts:
    """What the rows of an environment have in common, `rows` of them looked at.

    Attributes:
        tools: every row has tools, and the same descriptions of them.
        system: every row has the same system message.
    """

    rows: int
    tools: bool
    system: bool

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of rewording that would tell whether a model depends on these texts."""
        shared: list[tuple[Kind, bool]] = [("tools", self.tools), ("system", self.system)]
        return [kind for kind, is_shared in shared if is_shared]

    @property
    def sentence(self) -> str:
        """What is shared, as a sentence; "" for nothing."""
        texts = [
            text
            for text, is_shared in (
                ("one tool text", self.tools),
                ("one system message", self.system),
            )
            if is_shared
        ]
        return f"all {self.rows} rows share {' and '.join(texts)}" if texts else ""


def shared_texts(tasks: Iterable[TaskRow], env_tools: list[ToolSchema]) -> SharedTexts:
    """What the first `_MOST_ROWS` of these rows share; nothing for fewer than `_FEWEST_ROWS`."""
    rows = list(islice(tasks, _MOST_ROWS))
    tools = {json.dumps(tools_of(row, env_tools), sort_keys=True) for row in rows}
    systems = {_system_of(row) for row in rows}
    enough = len(rows) >= _FEWEST_ROWS
    return SharedTexts(
        rows=len(rows),
        tools=enough and len(tools) == 1 and tools != {"[]"},
        system=enough and len(systems) == 1 and systems != {""},
    )


def _system_of(row: TaskRow) -> str:
    """The text of the row's system message; "" without one."""
    first = row["prompt"][0] if row["prompt"] else {}
    return str(first.get("content") or "") if first.get("role") == "system" else ""
