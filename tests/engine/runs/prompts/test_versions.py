"""A prompt that was chosen becomes a version, and the version asks the same tasks."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompted import BAD, GOOD, push_sums

from engine.core.errors import UserError
from engine.core.wording.prompt_texts import SYSTEM
from engine.environments.push import push_env
from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home
from engine.runs.prompts.versions import make_version, with_prompt

TOOLS = """
from envs import MultiTurnEnv, Score, Task

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.",
        "parameters": {"type": "object", "properties": {}}}}


class Looking(MultiTurnEnv):
    tools = [TOOL]

    def tasks(self):
        own = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]
        return [Task(str(n), f"Look at {n}.", tools=own if n == 1 else None) for n in range(8)]

    def start(self, task):
        return {}

    def step(self, state, completion):
        return None

    def score(self, task, state):
        return Score(1.0)


def load_environment():
    return Looking()
"""


@settings(max_examples=30, deadline=None)
@given(
    st.text(max_size=60),
    st.dictionaries(st.text(min_size=1, max_size=10), st.text(max_size=20), max_size=3),
)
def test_any_text_survives_the_file_and_takes_the_place_of_an_earlier_one(system, tools):
    texts = {SYSTEM: system} | {f"tool {name}": text for name, text in tools.items()}
    earlier = '[prompt]\nsystem = "old"\n[prompt.tools]\na = "b"\n\n'
    before = f'secrets = ["A_KEY"]\n\n{earlier}[params]\nn = 1\n'
    data = tomllib.loads(with_prompt(before, texts, "sums@abc"))
    clean = {key: text.encode("utf-8", "replace").decode() for key, text in tools.items()}
    wanted = {name.encode("utf-8", "replace").decode(): text for name, text in clean.items()}
    assert data["prompt"].pop("system") == system.encode("utf-8", "replace").decode()
    assert data["prompt"].pop("tools", {}) == wanted
    assert data == {"secrets": ["A_KEY"], "params": {"n": 1}, "prompt": {"of": "sums@abc"}}


def test_the_version_asks_the_same_tasks_on_the_same_sides_and_is_not_the_newest(
    home: Home, tmp_path: Path
):
    env = find_env(home, push_sums(home, tmp_path / "a", size=4))
    made = find_env(home, make_version(home, env, {SYSTEM: GOOD}))
    again = find_env(home, make_version(home, made, {SYSTEM: ""}))
    assert find_env(home, "sums").env_id == env.env_id
    assert made.version.prompt_of == again.version.prompt_of == env.env_id
    sides = [
        [(task["id"], task["split"], task["prompt"][-1]) for task in read_tasks(version)]
        for version in (env, made, again)
    ]
    assert sides[0] == sides[1] == sides[2]
    assert {t["prompt"][0]["content"] for t in read_tasks(env)} == {BAD}
    assert {t["prompt"][0]["content"] for t in read_tasks(made)} == {GOOD}
    assert {len(t["prompt"]) for t in read_tasks(again)} == {1}
    assert all(t["gold"][:-1] == t["prompt"] for t in read_tasks(made))


def test_tools_say_what_the_prompt_says_whether_of_the_environment_or_of_a_task(
    home: Home, tmp_path: Path
):
    folder = tmp_path / "looking"
    folder.mkdir()
    (folder / "environment.py").write_text(TOOLS)
    env = find_env(home, push_env(home, folder).env_id)
    made = find_env(home, make_version(home, env, {SYSTEM: "Look.", "tool look": "Sees a thing."}))
    assert made.tools[0]["function"]["description"] == "Sees a thing."
    assert made.tools[0]["function"]["parameters"] == env.tools[0]["function"]["parameters"]
    (own,) = [task["tools"] for task in read_tasks(made) if task.get("tools")]
    assert own[0]["function"]["description"] == "Sees a thing."


def test_a_prompt_table_that_cannot_act_is_refused(home: Home, tmp_path: Path):
    push_sums(home, tmp_path / "a", size=4)
    for table, message in (
        ('[prompt]\nsystm = "x"\n', "unknown text 'systm'; did you mean system?"),
        ("[prompt]\nsystem = 3\n", "prompt.system is a text"),
        ('[prompt.tools]\nlook = "x"\n', "names 'look'; there are: none"),
    ):
        (tmp_path / "a" / "environment.toml").write_text(table)
        with pytest.raises(UserError, match="environment") as refused:
            push_env(home, tmp_path / "a", name="sums")
        assert message in refused.value.message


def test_a_version_that_is_said_to_be_of_another_and_is_not_cannot_be_paired_with_it(
    home: Home, tmp_path: Path
):
    other = push_sums(home, tmp_path / "other", size=5)
    push_sums(home, tmp_path / "a", size=4)
    (tmp_path / "a" / "environment.toml").write_text(f'[prompt]\nsystem = "x"\nof = "{other}"\n')
    reply = push_env(home, tmp_path / "a", name="sums")
    made = find_env(home, reply.env_id)
    assert made.version.prompt_of == ""
    assert any("asks other tasks" in warning for warning in made.version.warnings)
