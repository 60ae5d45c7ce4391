"""`[adapter]` in environment.toml: what is refused, and what it brings along."""

from pathlib import Path

import pytest

import envs.adapters
from envs.config.adapters import KINDS, Adapter
from envs.config.problem import EnvProblem
from envs.config.settings import read_settings

ADAPTERS = Path(str(envs.adapters.__file__)).parent
REFUSED = {
    '[adapter]\nkind = "skyrl"\n': "unknown kind of adapter 'skyrl'; did you mean skyrl-gym",
    "[adapter]\nsize = 3\n": "adapter is a table with a kind",
    'command = ["sh"]\n[adapter]\nkind = "rllm"\n': "a command is for environments without",
    '[adapter]\nkind = "synth"\n[rollout]\nreward = "exit"\n': "unknown rollout setting 'reward'",
    '[adapter]\nkind = "rllm"\n[rollout]\nseconds = 3\n': "[rollout] is for a command",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_table_that_cannot_be_meant_is_refused(text: str, tmp_path: Path):
    (tmp_path / "environment.toml").write_text(text)
    with pytest.raises(EnvProblem) as refused:
        read_settings(tmp_path)
    assert REFUSED[text] in refused.value.message


def test_every_kind_has_its_module_and_its_program():
    for name, kind in KINDS.items():
        assert (ADAPTERS / f"{kind.module}.py").is_file(), name
        assert not kind.program or (ADAPTERS / "programs" / kind.program).is_file(), name


def test_a_kind_with_a_program_is_a_command_with_the_limits_of_rollout(tmp_path: Path):
    toml = '[adapter]\nkind = "synth"\nserver = ["node", "a.mjs"]\n[rollout]\nseconds = 9\n'
    (tmp_path / "environment.toml").write_text(toml)
    settings = read_settings(tmp_path)
    assert settings.rollout is not None and settings.adapter is not None
    assert (settings.rollout.seconds, settings.rollout.reward) == (9, "stdout")
    assert settings.rollout.command[1].endswith("programs/synth_rollout.py")
    assert settings.adapter.serves


@pytest.mark.parametrize(
    ("kind", "options", "rooms", "rents"),
    [
        ("harbor", {}, True, False),
        ("harbor", {"sandbox": {"provider": "local"}}, True, False),
        ("harbor", {"sandbox": {"provider": "e2b"}}, False, True),
        ("harbor", {"sandbox": "e2b"}, True, False),  # refused where the options are read
        ("synth", {"sandbox": {"provider": "e2b"}}, False, False),
    ],
)
def test_harbor_tasks_have_rooms_in_their_own_box_or_rent_a_sandbox(kind, options, rooms, rents):
    adapter = Adapter(kind, options)
    assert (bool(adapter.rooms), adapter.rents) == (rooms, rents)
