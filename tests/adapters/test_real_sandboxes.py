"""Harbor tasks in sandboxes of two clouds, through the clouds' own packages: push, evaluate. The
clouds are servers on loopback (tests/helpers/fake_clouds.py).

Opt-in (`make adapters`): the packages are installed from the index that pip is set up for. What
holds without them is tested in tests/envs/sandboxes.
"""

from pathlib import Path
from typing import Any

import fake_clouds
import mini_container
import pytest
from adapter_walk import pushed
from harbor_play import write_folder, write_task
from loop_client import Agent, agent

from engine.home.run_dir import Home
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from envs.sandboxes import daytona, e2b

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not mini_container.possible(), reason="no namespaces can be made here"),
]
TOML = """
secrets = [{secrets}]

[adapter]
kind = "harbor"
agent = "{agent}"

[adapter.sandbox]
provider = "{provider}"
image = "debian-12"
price_per_hour = 0.5
open_seconds = 20

[rollout]
seconds = 60
at_once = 1

[limits]
network = true
processes = 128
memory_mb = 4096
"""
CLOUDS = {
    "daytona": (daytona.RELEASE, ("DAYTONA_API_KEY", "DAYTONA_API_URL")),
    "e2b": (e2b.RELEASE, ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_HTTP_VERSION")),
}


def folder_of(folder: Path, provider: str, agent_name: str) -> Path:
    """An environment of two tasks at a cloud."""
    release, secrets = CLOUDS[provider]
    names = ", ".join(f'"{name}"' for name in secrets)
    write_folder(folder, TOML.format(secrets=names, agent=agent_name, provider=provider))
    write_task(folder / "tasks", "other")
    (folder / "requirements.txt").write_text(release)
    return folder


def tell_where(
    cloud: fake_clouds.FakeCloud, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set the secrets by which the cloud's package finds the server on loopback."""
    _, secrets = CLOUDS[provider]
    values: dict[str, Any] = dict.fromkeys(secrets, cloud.url)
    values |= {f"{provider.upper()}_API_KEY": fake_clouds.KEY, "E2B_HTTP_VERSION": "1.1"}
    for name in secrets:
        monkeypatch.setenv(name, values[name])


async def answered(a: Agent, home: Home, env_id: str) -> list[EvaluationRow]:
    """The answers of an evaluation of one task."""
    asked = await a.call("evaluate", env_id=env_id, models=["pebble"], split="train", rows=1)
    ended = await a.wait(asked["run_id"], within_s=200)
    assert ended["state"] == "done", ended
    run = home.run(asked["run_id"])
    return read_evaluation(next(run.path.glob("evals/*.jsonl")))


@pytest.mark.parametrize("provider", CLOUDS)
async def test_tasks_are_solved_in_sandboxes_that_are_marked_limited_and_given_back(
    provider: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with fake_clouds.running(tmp_path / "cloud") as cloud:
        tell_where(cloud, provider, monkeypatch)
        folder = folder_of(tmp_path / "project" / "harbor", provider, "solution")
        async with agent(home, folder.parent) as a:
            env_id = (await pushed(a, folder))["env_id"]
            cloud.failures = [503]  # it is asked again
            (record,) = await answered(a, home, env_id)
            assert record.error is None and record.reward == 1.0
            assert record.metrics["sandbox_cost"] > 0 and record.metrics["sandbox_seconds"] > 0
            (made,) = cloud.created
            labels = made.get("labels") or made.get("metadata")
            assert labels["honesmith"] == "1" and labels["honesmith-env"].startswith("harbor-")
            assert fake_clouds.KEY in made["key"]
            assert made.get("ttlMinutes") == 2 or made.get("timeout") == 120
            assert cloud.open == {} and len(cloud.ended) == 1
            # A cloud that refuses costs the rollout with its reason, and is no 0 of the model.
            cloud.failures = [401] * 20
            (record,) = await answered(a, home, env_id)
            assert record.error is not None and "no sandbox" in record.error
            assert len(cloud.created) == 1


@pytest.mark.parametrize("provider", CLOUDS)
async def test_a_model_works_in_a_sandbox_and_is_trained(
    provider: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with fake_clouds.running(tmp_path / "cloud") as cloud:
        tell_where(cloud, provider, monkeypatch)
        folder = folder_of(tmp_path / "project" / "harbor", provider, "model")
        async with agent(home, folder.parent) as a:
            env_id = (await pushed(a, folder))["env_id"]
            settings = {"steps": 1, "prompts_per_step": 1, "group_size": 4, "max_tokens": 16}
            settings |= {"max_length": 512, "max_turns": 3}
            run = (await a.call("submit_train", env_id=env_id, settings=settings))["run_id"]
            trained = await a.wait(run, within_s=200)
            assert trained["state"] == "done", trained
            assert len(cloud.created) >= 4 and cloud.open == {}
