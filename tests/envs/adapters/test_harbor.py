"""Harbor tasks are pushed as an environment and played in the rollout's own box."""

import json
from pathlib import Path

import pytest
from harbor_play import TOML, boxed, played, write_folder, write_task

from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess
from envs.isolation.sandbox import Sandbox

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "env")


@boxed
def test_each_folder_is_a_task_with_its_instruction(folder: Path, start):
    about = '[metadata]\ndifficulty = "easy"\nauthor = "x"\n[environment]\ndocker_image = "x"'
    write_task(folder / "tasks", "other", task___toml=about)
    process: EnvProcess = start(folder)
    rows = process.tasks()
    assert process.describe()["kind"] == "command"
    assert [row["id"] for row in rows] == ["answer", "other"]
    assert rows[0]["prompt"][0]["content"] == "Write the word into /app/answer."
    assert rows[1]["metadata"] == {"folder": "tasks/other", "difficulty": "easy"}


WRONG = {
    "agent = 'robot'": "agent is one of model, solution, none",
    "calls = 'voice'": "calls is one of tool, block",
    "tasks = 'elsewhere'": "no task in elsewhere",
    "taks = 'tasks'": "did you mean tasks?",
    "sandbox = { provider = 'modal' }": "provider is one of local, docker, daytona, e2b",
    "verifier_seconds = 26": "raise seconds",
}


@boxed
@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_option_is_refused_with_what_is_allowed(line: str, folder: Path, start):
    (folder / "environment.toml").write_text(TOML.replace("[adapter]", f"[adapter]\n{line}"))
    with pytest.raises(EnvProblem) as problem:
        start(folder).describe()
    assert WRONG[line] in str(problem.value)


@boxed
def test_a_task_that_cannot_be_played_refuses_the_push(folder: Path, start):
    write_task(folder / "tasks", "big", task___toml="[environment]\ngpus = 2")
    with pytest.raises(EnvProblem, match="task big needs what is not supported: GPUs"):
        start(folder).describe()


def test_a_cloud_needs_the_network_and_its_package(folder: Path, start, monkeypatch):
    toml = TOML.replace('"harbor"', '"harbor"\nsandbox = { provider = "daytona" }')
    (folder / "environment.toml").write_text(toml)
    with pytest.raises(EnvProblem, match=r"put daytona==.* into requirements.txt"):
        start(folder).describe()


def test_without_its_walls_the_local_provider_refuses_with_the_reason(folder: Path, start):
    with pytest.raises(EnvProblem, match=r"provider local needs (namespaces|Landlock)"):
        start(folder, sandbox=Sandbox(mode="off", allow_root=True)).describe()


@boxed
def test_the_tests_grade_what_the_commands_have_left(folder: Path):
    score, model, _ = played(folder, ["echo red > answer", "cat answer; echo blue > answer"])
    assert (score["reward"], score["success"], score["error"]) == (1.0, True, None)
    assert score["metrics"]["commands"] == 2.0 and score["metrics"]["sandbox_seconds"] > 0
    assert model.told == ["exit status 0", "exit status 0\nred"]
    first = model.asked[0]
    assert first["tools"][0]["function"]["name"] == "bash"
    assert [message["role"] for message in first["messages"]] == ["system", "user"]


@boxed
def test_doing_nothing_and_a_wrong_answer_earn_nothing(folder: Path):
    for commands in ([], ["echo green > answer"]):
        score, _, _ = played(folder, commands)
        assert (score["reward"], score["success"], score["error"]) == (0.0, False, None)


@boxed
@pytest.mark.parametrize(("agent", "reward"), [("solution", 1.0), ("none", 0.0)])
def test_the_tasks_own_solution_earns_the_reward_and_nothing_does_not(
    agent: str, reward: float, folder: Path
):
    toml = TOML.replace("[adapter]", f'[adapter]\nagent = "{agent}"')
    (folder / "environment.toml").write_text(toml)
    score, model, _ = played(folder, ["echo green > answer"])
    assert (score["reward"], score["error"]) == (reward, None)
    assert len(model.asked) == 1 and model.asked[0]["max_tokens"] == 1


@boxed
def test_a_model_whose_template_knows_no_tools_writes_blocks(folder: Path):
    toml = TOML.replace("[adapter]", '[adapter]\ncalls = "block"')
    (folder / "environment.toml").write_text(toml)
    score, model, _ = played(folder, ["echo blue > answer"], blocks=True)
    assert score["reward"] == 1.0 and "tools" not in model.asked[0]
    assert model.asked[1]["messages"][-1] == {"role": "user", "content": "exit status 0"}


@boxed
def test_the_options_limit_how_many_commands_are_run_and_how_long(folder: Path):
    toml = TOML.replace("[adapter]", "[adapter]\ncommands = 2\ncommand_seconds = 0.3")
    (folder / "environment.toml").write_text(toml)
    score, model, _ = played(folder, ["sleep 20", "echo 2", "echo blue > answer"])
    assert (score["reward"], score["metrics"]["commands"]) == (0.0, 2.0)
    assert model.told == ["ended after 0 s"] and len(model.asked) == 2


@boxed
def test_a_task_costs_what_its_sandbox_costs_by_the_hour(folder: Path):
    sandbox = '[adapter]\nsandbox = { provider = "local", price_per_hour = 3600 }'
    (folder / "environment.toml").write_text(TOML.replace("[adapter]", sandbox))
    metrics = played(folder, [])[0]["metrics"]
    assert metrics["sandbox_cost"] == pytest.approx(metrics["sandbox_seconds"], abs=0.01)


# --- the reward ----------------------------------------------------------------------------

JSON, TEXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"
READ = {
    f"echo ' 0.25 ' > {TEXT}": (0.25, {}),
    f'echo \'{{"reward": 2, "style": 0.5}}\' > {JSON}; echo 0 > {TEXT}': (2.0, {"style": 0.5}),
    f"echo 1 > {TEXT}; exit 7": (1.0, {}),
    f"(sleep 0.2; echo 1 > {TEXT}) & echo 0 > {TEXT}": (0.0, {}),  # what the tests leave is ended
}


@boxed
@pytest.mark.parametrize("test", READ)
def test_the_reward_is_what_the_tests_wrote(test: str, tmp_path: Path):
    folder = write_folder(tmp_path / "env", tests__test___sh=test)
    score, _, _ = played(folder, [])
    reward, metrics = READ[test]
    assert (score["reward"], score["error"]) == (reward, None)
    assert {name: score["metrics"].get(name) for name in metrics} == metrics


JUNK = {
    "true": "the tests wrote no /logs/verifier/reward.txt",
    "echo sorry; exit 3": "(exit status 3): sorry",
    f"echo one > {TEXT}": "reward.txt is no number",
    f"echo nan > {TEXT}": "reward.txt is no finite number",
    f"echo inf > {TEXT}": "reward.txt is no finite number",
    f"echo '{{' > {JSON}": "reward.json is no JSON",
    f"echo 1 > {JSON}": "reward.json is no object of finite numbers",
    f"echo '{{\"reward\": true}}' > {JSON}": "reward.json is no object of finite numbers",
    f"echo '{{\"reward\": NaN}}' > {JSON}": "reward.json is no object of finite numbers",
    f"echo '{{\"speed\": 1}}' > {JSON}": "reward.json has speed, not reward",
    f"ln -s /etc/passwd {TEXT}": "reward.txt cannot be read",
    f"mkfifo {TEXT}": "reward.txt is no regular file",
    f"mkdir {JSON}": "reward.json is no regular file",
    f"head -c 99999 /dev/zero > {TEXT}": "has more than 65,536 bytes",
}


@boxed
@pytest.mark.parametrize("test", JUNK)
def test_what_is_no_reward_costs_the_rollout_and_is_no_zero_of_the_model(test: str, tmp_path: Path):
    folder = write_folder(tmp_path / "env", tests__test___sh=test)
    score, _, _ = played(folder, [])
    assert JUNK[test] in str(score["error"])


@boxed
def test_another_entry_of_the_rewards_can_be_the_reward(tmp_path: Path):
    toml = TOML.replace("[adapter]", '[adapter]\nreward_key = "speed"\nsuccess_reward = 0.5')
    test = f"echo '{json.dumps({'reward': 0, 'speed': 0.75})}' > {JSON}"
    score, _, _ = played(write_folder(tmp_path / "env", toml, tests__test___sh=test), [])
    assert (score["reward"], score["success"]) == (0.75, True)
    assert score["metrics"]["reward"] == 0.0
