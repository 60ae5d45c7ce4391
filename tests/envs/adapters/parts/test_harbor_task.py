"""Harbor tasks are read as Harbor reads them, and what is not done here is refused by name."""

from pathlib import Path

import pytest
from harbor_play import write_task

from envs.adapters.parts.harbor_task import TaskRefused, filled_in, read_task, task_folders

LOCAL = {"provider": "local"}
CLOUD = {"provider": "daytona"}


def test_a_task_is_read_with_its_limits_sizes_and_variables(tmp_path: Path):
    toml = """
    version = "1.1"
    [metadata]
    difficulty = "hard"
    tags = ["a"]
    [agent]
    timeout_sec = 120.5
    [verifier]
    timeout_sec = 30
    [verifier.env]
    MODE = "${MODE:-strict}"
    TOKEN = "Bearer ${JUDGE_KEY}"
    [environment]
    docker_image = "python:3.12"
    cpus = 1.5
    memory = "2G"
    storage_mb = 10240
    allow_internet = true
    env = { GREETING = "hello" }
    """
    folder = write_task(tmp_path, task___toml=toml)
    task = read_task(folder, CLOUD, ["JUDGE_KEY"])
    assert task.instruction == "Write the word into /app/answer."
    assert (task.image, task.workdir) == ("python:3.12", "")
    assert (task.cpus, task.memory_mb, task.disk_mb) == (2, 2048, 10240)
    assert (task.agent_seconds, task.verifier_seconds, task.network) == (120.5, 30.0, True)
    assert task.variables == {"GREETING": "hello"} and task.about["difficulty"] == "hard"
    assert task.verifier_variables == {"MODE": "strict", "TOKEN": "Bearer ${JUDGE_KEY}"}


def test_a_secret_is_filled_in_when_the_task_is_played(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "s3")
    monkeypatch.delenv("OTHER", raising=False)
    variables = {"TOKEN": "Bearer ${JUDGE_KEY}", "B": "${OTHER:-x y}"}
    assert filled_in(variables) == {"TOKEN": "Bearer s3", "B": "x y"}


def test_the_image_of_the_environment_takes_the_place_of_the_tasks(tmp_path: Path):
    folder = write_task(tmp_path, environment__Dockerfile="FROM x", task___toml="")
    task = read_task(folder, {**CLOUD, "image": "mine"}, [])
    assert task.image == "mine" and task.environment_files == []


def test_the_files_of_an_environment_without_dockerfile_go_into_the_working_folder(tmp_path: Path):
    folder = write_task(tmp_path, environment__data__a___txt="a", environment__b="b")
    task = read_task(folder, LOCAL, [])
    assert task.environment_files == [("b", b"b"), ("data/a.txt", b"a")]


@pytest.mark.parametrize(
    ("said", "network"),
    [
        ("", False),
        ("allow_internet = false", False),
        ("allow_internet = true", True),
        ('network_mode = "public"', True),
        ('network_mode = "no-network"', False),
    ],
)
def test_only_a_task_that_says_so_has_the_internet(said: str, network: bool, tmp_path: Path):
    folder = write_task(tmp_path, task___toml=f'[environment]\ndocker_image = "x"\n{said}')
    assert read_task(folder, CLOUD, []).network is network


REFUSED = {
    "[[steps]]\nname = 'a'": "its steps",
    "[environment]\n[[environment.mcp_servers]]\nname = 'a'": "MCP servers",
    "[environment]\ngpus = 1": "GPUs",
    "[environment]\ngpu_types = ['H100']": "GPUs",
    "[environment]\nos = 'windows'": "another system",
    "[environment]\nskills_dir = '/skills'": "skills_dir",
    "[environment.healthcheck]\ncommand = 'x'": "healthcheck",
    "[environment]\nnetwork_mode = 'allowlist'": "allowed hosts",
    "[environment]\nallowed_hosts = ['a.com']": "allowed hosts",
    "[verifier]\nenvironment_mode = 'separate'": "a box of its own",
    "[verifier.environment]\ndocker_image = 'x'": "a box of its own",
    "[[verifier.collect]]\ncommand = 'x'": "collect hooks",
    "[verifier]\nuser = 'a'": "another user",
    "[agent]\nuser = 'a'": "another user",
    "[agent]\ntimeout_sec = 'x'": "timeout_sec is a number",
    "[environment]\ncpus = 'two'": "cpus is a number",
    "[environment]\nmemory = 'much'": 'memory is a size such as "2G"',
    "environment = 3": "environment in task.toml is a table",
    "[verifier.env]\nA = '${NOT_GIVEN}'": 'secrets = ["NOT_GIVEN"]',
    "[environment.env]\nA = '${DAYTONA_API_KEY}'": "no provider's key",
    "[environment.env]\nA = '${B:-${DAYTONA_API_KEY}}'": "the default of B names a variable",
    "no toml": "cannot be read",
}


@pytest.mark.parametrize("toml", REFUSED)
def test_what_no_rollout_here_does_is_refused_by_name(toml: str, tmp_path: Path):
    folder = write_task(tmp_path, "hard-one", task___toml=toml)
    with pytest.raises(TaskRefused) as refusal:
        read_task(folder, CLOUD, ["DAYTONA_API_KEY"])
    assert REFUSED[toml] in str(refusal.value) and "hard-one" in str(refusal.value)


def test_compose_a_build_and_a_missing_verifier_are_refused(tmp_path: Path):
    compose = write_task(tmp_path, "a", environment__docker_compose___yaml="services: {}")
    (compose / "environment" / "docker_compose.yaml").rename(
        compose / "environment" / "docker-compose.yaml"
    )
    build = write_task(tmp_path, "b", environment__Dockerfile="FROM x", task___toml="")
    bare = write_task(tmp_path, "c")
    (bare / "tests" / "test.sh").unlink()
    for folder, said in (
        (compose, "services beside the sandbox"),
        (build, "docker_image in its task.toml"),
        (bare, "has no tests/test.sh"),
    ):
        with pytest.raises(TaskRefused, match=said):
            read_task(folder, CLOUD, [])


def test_the_local_provider_refuses_what_needs_a_container(tmp_path: Path):
    build = write_task(tmp_path, "a", environment__Dockerfile="FROM x")
    network = write_task(tmp_path, "b", task___toml="[environment]\nallow_internet = true")
    elsewhere = write_task(tmp_path, "c", task___toml="[environment]\nworkdir = '/work'")
    for folder, said in (
        (build, "provider local has no images"),
        (network, "needs the internet"),
        (elsewhere, "provider local has /app alone"),
    ):
        with pytest.raises(TaskRefused, match=said):
            read_task(folder, LOCAL, [])
    with pytest.raises(TaskRefused, match="names no image"):
        read_task(write_task(tmp_path, "d", task___toml=""), {"provider": "docker"}, [])


def test_tasks_are_found_at_any_depth_in_the_order_of_their_names(tmp_path: Path):
    for name in ("b", "a/deep", "a/early"):
        write_task(tmp_path, name)
    assert [path.name for path in task_folders(tmp_path)] == ["deep", "early", "b"]
