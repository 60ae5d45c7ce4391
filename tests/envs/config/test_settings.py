"""environment.toml: what it may say, and what is said about what it may not."""

import re
from pathlib import Path

import pytest

from envs.config.problem import EnvProblem
from envs.config.settings import BOUNDS, Limits, read_settings


def written(folder: Path, text: str) -> Path:
    (folder / "environment.toml").write_text(text)
    return folder


def test_without_a_file_the_defaults_hold(tmp_path: Path):
    settings = read_settings(tmp_path)
    assert settings.params == {} and settings.secrets == () and settings.limits == Limits()


def test_params_secrets_and_limits_are_read(tmp_path: Path):
    settings = read_settings(
        written(
            tmp_path,
            'secrets = ["JUDGE_KEY"]\n[params]\nrows = 3\n[limits]\ncall_seconds = 2.5\n'
            "network = true\nprocesses = 8\n",
        )
    )
    assert settings.params == {"rows": 3} and settings.secrets == ("JUDGE_KEY",)
    assert settings.limits == Limits(call_seconds=2.5, network=True, processes=8)


def test_the_models_that_may_be_asked_are_those_listed_and_the_judge_of_the_rubric(tmp_path: Path):
    assert read_settings(tmp_path).endpoints == ()
    (tmp_path / "rubric.toml").write_text('judge = "openai:big"\n')
    assert read_settings(tmp_path).endpoints == ("openai:big",)
    written(tmp_path, 'endpoints = ["openai:small", "openai:big"]\n')
    assert read_settings(tmp_path).endpoints == ("openai:small", "openai:big")
    (tmp_path / "rubric.toml").write_text('[judge]\nurl = "http://127.0.0.1:8/v1"\nmodel = "m"\n')
    written(tmp_path, "")
    assert read_settings(tmp_path).endpoints == ()


def test_the_share_of_dev_rows_is_read(tmp_path: Path):
    assert read_settings(written(tmp_path, "[split]\ndev = 0.125\n")).dev_share == 0.125
    assert read_settings(written(tmp_path, "[params]\nrows = 3\n")).dev_share == 0


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[param]\nx = 1\n", 1, "did you mean params?"),
        ("[params]\n[limits]\nmemory = 5\n", 3, "did you mean memory_mb?"),
        ("[limits]\ncall_seconds = true\n", 2, "is a number from"),
        ("[limits]\nmemory_mb = 1.5\n", 2, "is a whole number"),
        ("[limits]\nprocesses = 0\n", 2, "from 1 to"),
        ("[limits]\ncall_seconds = nan\n", 2, "got nan"),
        ("[limits]\nnetwork = 1\n", 2, "true or false"),
        ('secrets = "KEY"\n', 1, "a list of names"),
        ('secrets = ["key value"]\n', 1, "no name of a secret"),
        ('secrets = ["PYTHONPATH"]\n', 1, "steers the env process"),
        ('endpoints = "openai:big"\n', 1, "a list of names"),
        ('endpoints = ["http://127.0.0.1:8000/v1"]\n', 1, "a list of names"),
        ('command = ["sh"]\nendpoints = ["openai:big"]\n', 2, "a command can ask no model"),
        ("params = 3\n", 1, "params is a table"),
        ("split = 3\n", 1, "split is a table"),
        ("[split]\nden = 0.1\n", 2, "did you mean dev?"),
        ("[split]\ndev = 0.6\n", 2, "from 0 to 0.5"),
        ("[split]\ndev = true\n", 2, "from 0 to 0.5"),
        ("[params]\nx = \n", 2, "not valid TOML"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, line: int, said: str):
    with pytest.raises(EnvProblem) as caught:
        read_settings(written(tmp_path, text))
    assert said in caught.value.message
    assert (caught.value.file, caught.value.line) == ("environment.toml", line)


def test_every_numeric_limit_has_bounds():
    numeric = {name for name in Limits.__dataclass_fields__ if name != "network"}
    assert set(BOUNDS) == numeric
    for name, (low, high) in BOUNDS.items():
        assert low <= getattr(Limits(), name) <= high


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "environment.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(EnvProblem, match="UTF-8"):
        read_settings(tmp_path)


HTTP = 'command = ["sh"]\n[rollout]\nreward = "http"\n'


def rollout_of(folder: Path, text: str):
    (folder / "environment.toml").write_text(text)
    return read_settings(folder).rollout


def test_a_reward_server_is_a_network_that_the_program_does_not_have(tmp_path: Path):
    settings = read_settings(written(tmp_path, HTTP + 'reward_url = "https://h/reward?run=1"\n'))
    assert settings.rollout is not None and settings.rollout.reward_seconds == 30
    assert settings.network and not settings.limits.network


def test_a_command_has_defaults_and_what_the_table_says(tmp_path: Path):
    assert rollout_of(tmp_path, "") is None
    plain = rollout_of(tmp_path, 'command = ["sh", "agent.sh"]')
    assert plain is not None
    assert (plain.command, plain.reward, plain.seconds) == (("sh", "agent.sh"), "exit", 60)
    table = '[rollout]\nreward = "file"\nreward_file = "out/r.json"\nseconds = 2.5\nat_once = 3'
    told = rollout_of(tmp_path, f'command = ["sh"]\n{table}')
    assert told is not None
    assert (told.reward, told.reward_file) == ("file", "out/r.json")
    assert (told.seconds, told.at_once) == (2.5, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('command = "sh agent.sh"', "command is a program and its arguments"),
        ("command = []", "command is a program and its arguments"),
        ('command = ["sh", 1]', "command is a program and its arguments"),
        ('[rollout]\nreward = "exit"', "there is none"),
        ('command = ["sh"]\n[rollout]\nrewards = "exit"', "did you mean reward"),
        ('command = ["sh"]\n[rollout]\nreward = "judge"', "one of exit, stdout, file"),
        ('command = ["sh"]\n[rollout]\nreward = "http"', "asks reward_url"),
        (HTTP + 'reward_url = "ftp://h/"', "asks reward_url"),
        (HTTP + 'reward_url = "http://me:key@h/"', "without a user"),
        (HTTP + 'reward_url = "http://h:x/"', "asks reward_url"),
        (HTTP + 'reward_url = "http://h/"\n[limits]\nnetwork = true', "in the place of the reward"),
        (HTTP + 'reward_url = "http://h/"\nreward_seconds = 0', "reward_seconds is a number from"),
        ('command = ["sh"]\n[rollout]\nreward_url = "http://h/"', 'for reward = "http" alone'),
        ('command = ["sh"]\n[rollout]\nseconds = 0', "rollout.seconds is a number from 0.5"),
        ('command = ["sh"]\n[rollout]\nat_once = 2.5', "rollout.at_once is a whole number"),
        ('command = ["sh"]\n[rollout]\nreward_file = "r"', 'read with reward = "file" alone'),
        (
            'command = ["sh"]\n[rollout]\nreward = "file"\nreward_file = "../r"',
            "a path in the environment's folder",
        ),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_by_its_line(tmp_path: Path, text: str, why: str):
    with pytest.raises(EnvProblem, match=re.escape(why)) as caught:
        rollout_of(tmp_path, text)
    assert caught.value.code == "ENV_INVALID" and caught.value.line > 0
