"""A home of two keys: one has made things, the other has not."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answered import answer, evaluation, push, training
from env_versions import write_version
from mcp import Client

from engine.core.files import write_json
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.owners import May
from mcp_server.access.keys import Key, add_key

ALL = ("read", "train", "install", "deploy")


@dataclass(frozen=True)
class Things:
    """What a key has made: ids, as it would name them."""

    env: str
    env_id: str
    run: str
    evaluation: str
    plan: str
    deployment: str

    def names(self) -> list[str]:
        """Everything by which another key may try to name them."""
        runs = [self.run, self.evaluation, self.plan, self.deployment]
        models = [f"{self.run}@best", f"{self.run}@step2", self.run[:-1]]
        envs = [self.env, self.env_id, self.env_id[:-4], f"ana/{self.env}"]
        return [*runs, *models, *envs]


def of(home: Home, key: Key, may: May = "change") -> Home:
    """The home as a key sees it."""
    return Home(home.root, key.viewer(may))


def key_of(home: Home, name: str, scopes: tuple[str, ...] = ALL, **limits: Any) -> Key:
    return add_key(home, name, scopes, **limits)[0]


def stored(home: Home, env: str, digest: str = "a" * 12) -> str:
    """A version as a push would have stored it, of whoever sees the home; its id."""
    folder = home.env(env, digest)
    with Store(home) as store:  # opened first: a new database takes up what lies in the home
        (folder / "source").mkdir(parents=True, exist_ok=True)
        (folder / "source" / "environment.py").write_text("# tasks\n")
        (folder / "tasks.jsonl").write_text("")
        write_version(folder / "env.json", rows={"train": 1, "heldout": 1})
        write_json(folder / "audit.json", {"verdict": "ok"})
        return store.add_env(env, digest, kind="single", info={"rows": {}}).env_id


def valid_with(his: Things, folder: Path) -> dict[str, Any]:
    """What a key may give in a call: by argument, and for some tools by tool."""
    return {
        "env_id": his.env,
        "run_id": his.run,
        "models": ["pebble"],
        "ids": ["pebble"],
        "others": ["pebble"],
        "source_ids": [his.evaluation],
        "name": "new",
        "model": "nobody",
        "message": "hi",
        "path": str(folder / "none"),
        "wait_run": {"timeout_s": 0},
        "submit_train": {"env_id": his.env, "algorithm": "sft"},
        "evaluate": {"env_id": his.env, "models": ["pebble"]},
    }


def things_of(
    home: Home, key: Key, folder: Path | None = None, env: str = "secret", digest: str = "a" * 12
) -> Things:
    """Everything that can have an owner, made by `key`; with a folder the environment is pushed."""
    own = of(home, key)
    env_id = push(own, folder, name=env) if folder else stored(own, env, digest)
    rows = [answer("9+1", "10", 1.0), answer("9+2", "12", 0.0)]
    run = training(own, env_id, rollouts={1: rows}, evals={0: rows, 2: rows})
    judged = evaluation(own, env_id, {run.id: rows})
    with Store(own) as store:
        deployment = store.add_deployment(
            base_name="pebble", base_path="/x", adapters=[], serve_base=True, memory_bytes=1
        )
    folder_of = home.deployment(deployment.deployment_id).path
    folder_of.mkdir(parents=True)
    write_json(folder_of / "config.json", {"base_path": "/x", "owner": key.id, "asker": key.id})
    with Store(own) as store:
        new = store.get_run(run.id)
        store.update_run(run.id, only_in={new.state}, plan=f"{key.id}.{env}-plan-1")
    return Things(
        env, env_id, run.id, judged.id, f"{key.id}.{env}-plan-1", deployment.deployment_id
    )


def absent(name: str) -> str:
    """A name of the same form that nothing has."""
    name = name.replace("secret", "zebras").replace("pebble", "zebble")
    stem, at, digest = name.partition("@")
    is_env = at and not digest.startswith(("best", "step"))
    # Each character becomes another one of its kind, so that an expression is read the same way.
    others = str.maketrans("0123456789abcdef", "1234567890bcdefa")
    return f"{stem}@{digest.translate(others)}" if is_env else name


def told(text: str, name: str) -> str:
    """A reply without the name that was asked for and without numbers, which time may change."""
    for part in (name, name.partition("@")[0], name.rpartition("/")[2], name.rpartition("/")[0]):
        text = text.replace(part, "NAME") if len(part) > 3 else text
    return re.sub(r"[0-9]+(\.[0-9]+)?", "0", text)


async def tell_apart(
    client: Client, names: Sequence[str], valid: Mapping[str, Any]
) -> tuple[int, list[Any]]:
    """Call every tool with each of the names and with one that nothing has. Returns how many pairs
    of calls there were, and those whose answers tell the names apart."""
    tried, apart = 0, []
    for tool in (await client.list_tools()).tools:
        for name in names:
            pairs = zip(
                calls_with(tool.name, tool.input_schema, name, valid),
                calls_with(tool.name, tool.input_schema, absent(name), valid),
                strict=True,
            )
            for (field, with_name), (_, with_none) in pairs:
                if field == "name":
                    continue  # a name that is given, not looked up
                answer = await client.call_tool(tool.name, with_name)
                other = await client.call_tool(tool.name, with_none)
                texts = answer.content[0].text, other.content[0].text  # type: ignore[union-attr]
                same = told(texts[0], name) == told(texts[1], absent(name))
                if answer.is_error != other.is_error or (answer.is_error and not same):
                    apart.append((tool.name, with_name, *texts))
                tried += 1
    return tried, apart


def calls_with(
    tool: str, schema: Mapping[str, Any], name: str, valid: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of a tool with `name` in each argument that can hold it, and what is valid elsewhere:
    made from the schema, so that an argument nobody has thought of is tried too."""
    properties = schema["properties"]
    least = {field: valid[field] for field in schema.get("required", [])}
    least |= valid.get(tool, {})
    for field, described in properties.items():
        if "enum" in described:
            continue
        values: list[Any] = []
        if described["type"] == "string":
            values = [name]
        elif described["type"] == "array" and described.get("items", {}).get("type") == "object":
            values = [[{key: name}] for key in ("model", "env_id")]
            values += [[{"settings": {"teacher": name}}]]
        elif described["type"] == "array":
            values = [[name], [*valid.get("others", []), name]]
        elif described["type"] == "object":
            values = [{key: name} for key in ("teacher", "reflection", "compute", "keep", "model")]
            values += [{"teacher": [name]}, {"env_id": [name]}, {"parent": name}]
        for value in values:
            yield field, least | {field: value}
