"""Which functions a model may call on a task."""

import pytest

from envs import Task
from envs.tool_schemas import checked_tools, tools_of

ENV = [{"type": "function", "function": {"name": "search"}}]
OWN = [{"type": "function", "function": {"name": "lookup", "description": "Price."}}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"metadata": {}}, ENV),
        ({"metadata": {}, "tools": OWN}, OWN),
        ({"metadata": {}, "tools": []}, []),  # a task may have none
        ({"metadata": {"tools": OWN}}, OWN),  # a row of a data file
        ({"metadata": {"tools": [{"name": "lookup", "parameters": {}}]}}, "metadata"),
        ({"metadata": {"tools": ["hammer", "saw"]}}, ENV),  # not what a model could call
        ({"metadata": {"tools": "hammer"}}, ENV),
        ({"metadata": None}, ENV),
    ],
)
def test_a_tasks_own_tools_come_before_those_of_its_environment(row, expected):
    assert tools_of(row, ENV) == (row["metadata"]["tools"] if expected == "metadata" else expected)


def test_a_task_keeps_its_tools_when_it_is_stored():
    task = Task("a", "Ask.", tools=OWN)
    assert Task.from_row(task.to_row()).tools == OWN
    assert Task("a", "Ask.", tools=[]).to_row()["tools"] == []
    assert "tools" not in Task("a", "Ask.").to_row()


@pytest.mark.parametrize("tools", ["lookup", {"name": "lookup"}, 3, [{"name": "lookup"}], [{}]])
def test_what_is_no_list_of_functions_is_refused_with_the_task(tools):
    with pytest.raises(ValueError, match="the tools of task 'a'"):
        Task("a", "Ask.", tools=tools)
    with pytest.raises(ValueError):
        checked_tools(tools)
