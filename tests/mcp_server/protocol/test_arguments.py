"""What arguments of a call are taken, and how the others are refused."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.home.run_dir import Home
from mcp_server.protocol.arguments import check_arguments
from mcp_server.protocol.tools import all_tools

TOOLS = {tool.name: tool for tool in all_tools(Home(Path("/nowhere")), ())}
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
ARGUMENTS = st.sampled_from(["run_id", "limit", "models", "settings", "timeout_s", "env_id", "x"])


@given(
    name=st.sampled_from(["get_status", "submit_train", "wait_run", "evaluate", "chat"]),
    arguments=st.dictionaries(ARGUMENTS, VALUES, max_size=5),
)
def test_arguments_are_taken_or_refused_and_never_crash(name: str, arguments: dict):
    try:
        check_arguments(TOOLS[name], arguments)
    except UserError as error:
        assert error.code in ("UNKNOWN_ARGUMENT", "BAD_ARGUMENT")
        assert error.hint
