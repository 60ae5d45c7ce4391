"""What is read by its address: the same through `read_playbook` as through a resource."""

import pytest
from mcp import Client

from engine.core.errors import UserError
from engine.home.run_dir import Home
from mcp_server.api import addresses
from mcp_server.protocol.app import build_server


@pytest.mark.parametrize(
    "address",
    ["run://pebble/card", "train://settings", "train://settings/grpo", "train://hardware"],
)
async def test_a_client_with_tools_alone_reads_what_is_a_resource(home: Home, address: str):
    async with Client(build_server(home)) as client:
        result = await client.call_tool("read_playbook", {"section": address})
        resource = await client.read_resource(address)
    told = "".join(getattr(part, "text", "") for part in result.content)
    read = "".join(getattr(part, "text", "") for part in resource.contents)
    same = 40 if address == "train://hardware" else 10_000  # free memory changes
    assert not result.is_error and told[:same] == read[:same]


async def test_the_list_of_models_leads_to_the_card_of_a_base_model(home: Home):
    async with Client(build_server(home)) as client:
        status = await client.call_tool("get_status", {"scope": "models"})
        assert status.structured_content
        (call,) = status.structured_content["next"]
        card = await client.call_tool(call["tool"], call["arguments"])
    text = "".join(getattr(part, "text", "") for part in card.content)
    assert text.startswith("# pebble") and "What it can do" in text


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("run://nobody-1/card", "RUN_NOT_FOUND"),
        ("run://../../etc/config", "RUN_NOT_FOUND"),
        ("run:///etc/passwd/card", "RUN_NOT_FOUND"),
        ("env://nothing/source", "ENV_NOT_FOUND"),
        ("file:///etc/passwd", "SECTION_NOT_FOUND"),
        ("playbook://TRAINING.md/nonsense", "SECTION_NOT_FOUND"),
    ],
)
def test_what_has_no_address_is_refused_with_the_next_move(home: Home, address: str, code: str):
    with pytest.raises(UserError) as caught:
        addresses.read(home, address)
    assert caught.value.code == code and caught.value.hint
