"""The real Codex against a model that plays a script."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_script import LOOP, REFUSED, the_loop, the_refusals, tools_called
from fake_model import SAID_AT_THE_END, Call, FakeModel, Script, fake_model

pytestmark = [pytest.mark.clients, pytest.mark.timeout(60)]

Installed = Callable[[str], Path]


@pytest.fixture
def codex(installed: Installed) -> str:
    return str(installed("codex") / "node_modules" / ".bin" / "codex")


def variables(project, tmp_path: Path, model: FakeModel | None = None) -> dict[str, str]:
    """A key that is none, and a configuration folder that trusts the project's own file."""
    config = tmp_path / "codex-config"
    config.mkdir(exist_ok=True)
    url = model.url if model else "http://127.0.0.1:9"
    (config / "config.toml").write_text(
        "\n".join(
            [
                'model = "scripted"',
                'model_provider = "scripted"',
                'approval_policy = "never"',
                "check_for_update_on_startup = false",
                "[model_providers.scripted]",
                'name = "scripted"',
                f'base_url = "{url}/v1"',
                'wire_api = "responses"',
                'env_key = "SCRIPTED_KEY"',
                f"[projects.{json.dumps(str(project.folder))}]",
                'trust_level = "trusted"',
            ]
        )
    )
    return {"CODEX_HOME": str(config), "SCRIPTED_KEY": "no-key"}


def until_offered(names: list[str]) -> Script:
    """A first turn may come before the server's tools are listed."""
    wanted = {f"honesmith/{name}" for name in names}
    for _ in range(50):
        seen = yield Call("list_mcp_resources", {"server": "honesmith"}, server="")
        if wanted <= seen.offered:
            return
    raise AssertionError(f"not offered: {sorted(wanted - seen.offered)}; {seen.text[:500]}")


def test_the_list_has_the_server(codex, project, tmp_path: Path):
    listed = project.run([codex, "mcp", "list", "--json"], **variables(project, tmp_path))
    assert listed.returncode == 0, listed.stderr
    (entry,) = json.loads(listed.stdout)
    assert entry["name"] == "honesmith" and entry["enabled"] is True


@pytest.mark.worker
@pytest.mark.timeout(300)
def test_a_scripted_agent_goes_from_push_to_chat(codex, project, tmp_path: Path):
    argv = [codex, "exec", "--skip-git-repo-check", "--json", "Train it."]
    with fake_model(the_loop(project.folder / "arithmetic", until_offered)) as model:
        ran = project.run(argv, 280, **variables(project, tmp_path, model))
    if model.problem:
        raise model.problem
    assert ran.returncode == 0, ran.stderr[-2_000:]
    assert tools_called(model.shown) == LOOP
    assert SAID_AT_THE_END in ran.stdout
    last = json.dumps(model.requests[-1]["tools"])
    assert "Start with model" in last and "continue with next_cursor" in last, "not whole"


def test_refusals_reach_the_model_whole(codex, project, tmp_path: Path):
    project.home.config_file.write_text("auto_approve_gpu_hours = 0\n")
    argv = [codex, "exec", "--skip-git-repo-check", "Train it."]
    with fake_model(the_refusals(project.folder / "arithmetic", until_offered)) as model:
        project.run(argv, **variables(project, tmp_path, model))
    if model.problem:
        raise model.problem
    assert tools_called(model.shown) == REFUSED
