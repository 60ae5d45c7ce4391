"""What a key sees of others: nothing. Every tool and every resource with the other's names, made
from the tool list, so that a new tool or argument is tried without anybody thinking of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError
from run_configs import train_config
from stand_ins import stand_in
from team import (
    Things,
    absent,
    key_of,
    of,
    stored,
    tell_apart,
    things_of,
    told,
    valid_with,
)

from engine.core.errors import UserError
from engine.environments import registry
from engine.environments.registry import find_env
from engine.home.owner_marks import home_of_owner, own_part
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.records.run_config import as_run_config
from engine.runs.submit.run_folder import RunFiles
from mcp_server.access import viewing
from mcp_server.access.keys import Key, Keys, add_key, remove_key, rotate_key
from mcp_server.access.sharing import share
from mcp_server.protocol import guard
from mcp_server.protocol.app import build_server
from mcp_server.protocol.tools import NEEDS

pytestmark = pytest.mark.timeout(30)
RESOURCES = (
    "run://{}/metrics",
    "run://{}/config",
    "run://{}/card",
    "run://{}/report",
    "env://{}/source",
)


@pytest.fixture
def ana(home: Home) -> Key:
    return key_of(home, "ana")


@pytest.fixture
def bob(home: Home) -> Key:
    return key_of(home, "bob")


@pytest.fixture
def hers(home: Home, ana: Key) -> Things:
    return things_of(home, ana)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(launcher, "start_queued", lambda home: [])
    stand_in(monkeypatch, trainer=tmp_path / "none.py")  # nor is this machine's speed measured


def calling_as(monkeypatch: pytest.MonkeyPatch, key: Key) -> None:
    monkeypatch.setattr(guard, "caller_of", lambda context: key)


Calls = list[tuple[str, dict[str, Any]]]


async def replies(client: Client, calls: Calls) -> list[tuple[bool, str]]:
    answers = []
    for tool, arguments in calls:
        result = await client.call_tool(tool, arguments)
        answers.append((bool(result.is_error), result.content[0].text))
    return answers


@pytest.mark.timeout(120)
async def test_every_tool_answers_anothers_name_as_one_that_does_not_exist(
    home: Home, ana: Key, bob: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hers = things_of(home, ana, tmp_path / "ana")
    his = things_of(home, bob, tmp_path / "bob", env="sums")
    before = snapshot(home, "ana")
    calling_as(monkeypatch, bob)
    async with Client(build_server(home, [tmp_path])) as client:
        # The rest of her names, over HTTP and with every scope: tests/faults/test_team_attacks.py.
        names = [hers.run]
        tried, apart = await tell_apart(client, names, valid_with(his, tmp_path))
    assert not apart
    assert tried > 40
    assert snapshot(home, "ana") == before, "nothing of hers has changed"


def snapshot(home: Home, owner: str) -> tuple[Any, ...]:
    """Everything in the database that belongs to an owner."""
    with Store(home) as store:
        runs = [row for row in store.list_runs(1000) if row.owner == owner]
        envs = [row for row in store.list_envs() if row.owner == owner]
        deployments = [row for row in store.list_deployments() if row.owner == owner]
    return runs, envs, deployments


async def test_no_list_no_resource_and_no_completion_tells_of_what_others_have(
    home: Home, hers: Things, bob: Key, monkeypatch: pytest.MonkeyPatch
):
    calling_as(monkeypatch, bob)
    async with Client(build_server(home, [])) as client:
        for scope in ("all", "runs", "envs", "models", "datasets", "deployments", "hardware"):
            result = await client.call_tool("get_status", {"scope": scope})
            text = result.content[0].text
            assert "secret" not in text and "ana" not in text.replace("anal", ""), text
        for uri in RESOURCES:
            for name in (hers.run, hers.env_id, hers.env):
                errors = []
                for each in (name, absent(name)):
                    with pytest.raises(MCPError) as error:
                        await client.read_resource(uri.format(each))
                    errors.append(told(str(error.value), each))
                assert errors[0] == errors[1]
        address = {"section": f"run://{hers.run}/report"}
        none = {"section": f"run://{absent(hers.run)}/report"}
        answers = await replies(client, [("read_playbook", address), ("read_playbook", none)])
        assert told(answers[0][1], hers.run) == told(answers[1][1], absent(hers.run))


def test_every_tool_has_a_word_for_what_it_does_with_names():
    assert set(viewing.ACCESS_BY_TOOL) == set(NEEDS)
    of_new_tool = viewing.access_of_call("a_new_tool", {})
    assert of_new_tool == "change", "what nobody has thought of sees its own"
    assert viewing.access_of_call("submit_train", {"resume": "r-1"}) == "change"
    assert viewing.access_of_call("deploy", {"action": "stop"}) == "change"


def test_outside_a_request_nobody_is_shown_anything(home: Home):
    with pytest.raises(LookupError):
        viewing.caller_view(home)


def test_a_path_into_the_home_leads_nowhere_for_a_key(home: Home, hers: Things, bob: Key):
    from engine.environments.push import push_env
    from engine.models.catalog import check_in_sight

    his = of(home, bob, "use")
    source = registry.find_env(home, hers.env).source
    for path in (source, home.run(hers.run).path, home.run("nobody-1").path, home.root / "envs"):
        with pytest.raises(UserError) as refusal:
            push_env(his, path, roots=[home.root.parent])
        assert refusal.value.code == "PATH_OUTSIDE_ROOTS", path
    with pytest.raises(UserError) as refusal:
        check_in_sight(his, str(home.run(hers.run).path))
    assert refusal.value.code == "MODEL_NOT_FOUND"


def test_runs_of_keys_are_counted_by_themselves(home: Home, hers: Things, bob: Key):
    his = things_of(home, bob)
    assert (hers.run, his.run) == ("ana.secret-grpo-1", "bob.secret-grpo-1")
    assert his.deployment == "bob.pebble-1"


def test_two_keys_have_a_name_each_and_share_what_is_equal(
    home: Home, hers: Things, ana: Key, bob: Key
):
    equal = stored(of(home, bob), "secret")  # the same files under the same name
    assert registry.find_env(of(home, bob), "secret").env_id == equal == hers.env_id
    with Store(home) as store:
        assert len(store.list_envs()) == 1, "one version of two owners"
    newest = stored(of(home, bob), "secret", "b" * 12)
    assert registry.find_env(of(home, bob), "secret").env_id == newest
    assert registry.find_env(of(home, ana), "secret").env_id == hers.env_id, "hers is still hers"
    share(of(home, bob), "secret", ["ana"])
    reading = of(home, ana, "read")
    assert registry.find_env(reading, "secret").env_id == hers.env_id, "own comes first"
    assert registry.find_env(reading, "bob/secret").env_id == newest
    with pytest.raises(UserError) as refusal:
        registry.find_env(home, "secret")
    assert refusal.value.code == "ENV_AMBIGUOUS" and "ana/secret, bob/secret" in refusal.value.hint


def test_shared_to_be_read_is_read_and_shared_to_be_used_is_used_but_never_changed(
    home: Home, hers: Things, ana: Key, bob: Key
):
    share(of(home, ana), hers.run, ["bob"])
    share(of(home, ana), hers.env, may="use")

    def sees(may: Any) -> str:
        try:
            with Store(of(home, bob, may)) as store:
                return store.get_run(hers.run).owner
        except UserError as error:
            return error.code

    assert (sees("read"), sees("use"), sees("change")) == ("ana", "FORBIDDEN", "FORBIDDEN")
    assert registry.find_env(of(home, bob, "use"), hers.env).env_id == hers.env_id
    with pytest.raises(UserError) as refusal:
        registry.find_env(of(home, bob, "change"), hers.env)
    assert refusal.value.code == "FORBIDDEN"
    share(of(home, ana), hers.run, ["bob"], may="use")
    assert sees("use") == "ana"
    share(of(home, ana), hers.run, ["bob"], stop=True)
    assert sees("read") == "RUN_NOT_FOUND"
    with pytest.raises(UserError, match="belongs to another key"):
        share(of(home, bob), hers.env)


def test_an_admin_key_and_the_local_user_see_everything_with_its_owner(home: Home, hers: Things):
    from engine.runs.overview import overview

    boss = key_of(home, "boss", ("read", "admin"))
    for seen in (home, of(home, boss, "read")):
        status = overview(seen, "all")
        assert {entry["owner"] for entry in status["runs"]} == {"ana"}
        assert status["envs"][0]["owner"] == "ana"


def test_what_a_key_owns_survives_a_new_token_and_is_inherited_by_no_later_key(
    home: Home, hers: Things
):
    keys = Keys(home, "owners-token-of-the-test")
    key, token = rotate_key(home, "ana")
    assert keys.find(token.encode()) == key and key.id == "ana"
    with Store(of(home, key)) as store:
        assert store.get_run(hers.run).owner == "ana"
    remove_key(home, "ana")
    later, _ = add_key(home, "ana", ["read", "train"])
    assert later.id == "ana-2"
    with Store(of(home, later)) as store, pytest.raises(UserError, match="there is no run"):
        store.get_run(hers.run)


def test_owners_are_still_known_after_the_database_was_lost(home: Home, hers: Things, bob: Key):
    for name in ("honesmith.db", "honesmith.db-wal", "honesmith.db-shm"):
        (home.root / name).unlink(missing_ok=True)
    home.run(hers.run).status_md.write_text("")
    with Store(of(home, bob, "read")) as store:
        assert store.list_envs() == [] and store.list_deployments() == []
    with Store(home) as store:
        assert [row.owner for row in store.list_envs()] == ["ana"]
        assert [row.owner for row in store.list_deployments()] == ["ana"]


def test_the_folder_of_a_run_says_whose_it_is(home: Home):
    cem = key_of(home, "cem", project="robots", priority="low")
    for seen, owned in ((of(home, cem), ("cem", "robots", "low")), (home, ("", "", "normal"))):
        config = train_config(run_id="r-1")
        RunFiles(config).writer(seen)("r-1")
        read = home.run("r-1").read_config()
        assert (read.owner, read.project, read.priority) == owned


def test_a_subscriber_hears_of_its_own_runs_alone(home: Home, hers: Things, ana: Key, bob: Key):
    from mcp.server.subscriptions import ResourceUpdated

    from mcp_server.protocol.app import _listener_for_caller

    heard: dict[str, list[Any]] = {"ana": [], "bob": []}
    event = ResourceUpdated(uri=f"run://{hers.run}/metrics")
    for key in (ana, bob):
        with viewing.viewing(key):
            listener = _listener_for_caller(home, heard[key.name].append)
        listener(event)
    assert heard == {"ana": [event], "bob": []}


def test_json_of_an_environment_names_its_owner_for_others_only(home: Home, hers: Things, ana: Key):
    assert "owner" not in json.dumps([row.to_json() for row in registry.list_envs(of(home, ana))])
    assert registry.list_envs(home)[0].owner == "ana"


def test_a_run_looks_up_by_name_what_its_owner_has_and_nothing_that_others_share(
    home: Home, ana: Key, bob: Key
):
    stored(of(home, ana), "keep")
    share(of(home, ana), "keep", may="use")
    configs = {name: as_run_config(train_config(owner=name)) for name in ("", "ana", "bob")}
    assert find_env(home_of_owner(home, configs["ana"]), "keep").name == "keep"
    for name in ("", "bob"):
        with pytest.raises(UserError):
            find_env(home_of_owner(home, configs[name]), "keep")
    assert own_part(home).viewer == home_of_owner(home, configs[""]).viewer
