"""Tools of an MCP server on the way to an answer: each rollout has a server of its own."""

import json

import pytest

from envs.host.process import EpisodeFailed

SERVER = """
    import json, sys

    total = 0
    TOOLS = [{"name": "add", "description": "Add to the total.",
              "inputSchema": {"type": "object", "properties": {"by": {"type": "integer"}}}}]
    for line in sys.stdin:
        asked = json.loads(line)
        method, params = asked.get("method"), asked.get("params", {})
        if "id" not in asked:
            continue
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
        if method == "initialize":
            answer = {"result": {"protocolVersion": params["protocolVersion"]}}
        elif method == "tools/list" and "cursor" not in params:
            answer = {"result": {"tools": TOOLS, "nextCursor": "more"}}
        elif method == "tools/list":
            answer = {"result": {"tools": [{"name": "second", "inputSchema": {"type": "object"}}]}}
        elif params["name"] != "add":
            answer = {"error": {"code": -32602, "message": "no such tool"}}
        else:
            total += params["arguments"]["by"]
            answer = {"result": {"content": [{"type": "text", "text": str(total)}]}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
    """
TOML = """
    [adapter]
    kind = "mcp"
    server = ["python3", "server.py"]
    scorer = "number"
    """
ROWS = "".join(
    json.dumps({"prompt": f"Add up to {number}.", "answer": str(number)}) + "\n"
    for number in range(5, 15)
)


def called(name: str, **arguments: int) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def test_tools_are_called_and_the_last_message_is_scored(write_folder, start):
    process = start(write_folder(TOML, {"server.py": SERVER, "rows.jsonl": ROWS}))
    rows = process.tasks()
    assert [tool["function"]["name"] for tool in process.describe()["tools"]] == ["add", "second"]
    episode, other = process.start(rows[0]), process.start(rows[0])
    assert episode.step(called("add", by=2))[0]["content"] == "2"
    assert episode.step(called("add", by=3))[0]["content"] == "5"
    assert other.step(called("add", by=1))[0]["content"] == "1"  # a server of its own
    assert other.step(called("drop"))[0]["content"] == "no such tool"
    for each in (episode, other):
        assert each.step({"role": "assistant", "content": "5"}) is None
    score, second = episode.score(), other.score()
    assert (score["reward"], score["success"]) == (1.0, True)
    assert score["metrics"] == {"tool_calls": 2.0, "failed_calls": 0.0}
    assert second["metrics"] == {"tool_calls": 2.0, "failed_calls": 1.0}


def test_a_server_that_ends_costs_its_rollout_and_says_so(write_folder, start):
    dying = SERVER.replace("total += ", "sys.exit(3); total += ")
    process = start(write_folder(TOML, {"server.py": dying, "rows.jsonl": ROWS}))
    episode = process.start(process.tasks()[0])
    with pytest.raises(EpisodeFailed, match="the MCP server has ended"):
        episode.step(called("add", by=2))
    assert "the MCP server has ended" in episode.score()["error"]


def test_a_server_that_writes_no_messages_is_named_at_the_push(write_folder, start):
    process = start(write_folder(TOML, {"server.py": "print('hello')", "rows.jsonl": ROWS}))
    score = process.score({"id": "a", "prompt": [], "answer": None}, "6")
    assert "a line that is no message: b'hello" in score["error"]
