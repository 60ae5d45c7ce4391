"""Which texts all rows of an environment share."""

from typing import Any

from engine.core.wording.shared import shared_texts
from envs.json_types import TaskRow

TOOL = {"type": "function", "function": {"name": "lookup", "description": "Price."}}
OTHER = {"type": "function", "function": {"name": "lookup", "description": "Cost."}}


def rows(count: int, system: str = "", **more: Any) -> list[TaskRow]:
    first = [{"role": "system", "content": system}] if system else []
    prompts = ([*first, {"role": "user", "content": f"{n}?"}] for n in range(count))
    return [
        {"id": str(n), "prompt": prompt, "metadata": {}, **more} for n, prompt in enumerate(prompts)
    ]


def test_one_tool_text_and_one_system_message_are_named_with_the_rows() -> None:
    shared = shared_texts(rows(320, "Be brief."), [TOOL])
    assert shared.sentence == "all 320 rows share one tool text and one system message"
    assert shared.kinds == ["tools", "system"]


def test_tools_of_a_tasks_own_are_varied_texts() -> None:
    varied = [*rows(160), *rows(160, tools=[OTHER])]
    assert shared_texts(varied, [TOOL]).kinds == []
    assert shared_texts(rows(320, tools=[OTHER]), [TOOL]).sentence == (
        "all 320 rows share one tool text"
    )


def test_rows_without_tools_and_a_handful_of_rows_share_nothing() -> None:
    assert shared_texts(rows(320), []).sentence == ""
    assert shared_texts(rows(320, tools=[]), [TOOL]).kinds == []
    assert shared_texts(rows(19, "Be brief."), [TOOL]).kinds == []
