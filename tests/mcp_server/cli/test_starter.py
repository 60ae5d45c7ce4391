"""`honesmith init`: a project that can be trained, and what each agent reads."""

import json
from pathlib import Path

from command_line import call

from engine.home.run_dir import Home
from engine.settings.train_files import load_toml


def test_init_starts_a_project_and_a_second_one_changes_nothing(home: Home, tmp_path: Path):
    project = tmp_path / "project"
    agents = ("--agent", "claude,cursor", "--agent", "codex", "--agent", "vscode")
    first = call("init", str(project), *agents, "--json")
    assert first.exit_code == 0, first.output
    files = json.loads(first.stdout)["files"]
    assert {name for name, how in files.items() if how == "written"} >= {
        ".mcp.json",
        ".cursor/mcp.json",
        ".codex/config.toml",
        ".vscode/mcp.json",
        "train.toml",
        "environments/first_env/environment.py",
    }
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    second = json.loads(call("init", str(project), *agents, "--json").stdout)
    assert set(second["files"].values()) == {"kept", "unchanged"}
    assert before == {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    entry = json.loads((project / ".mcp.json").read_text())["mcpServers"]["honesmith"]
    assert entry["args"][-4:-2] == ["serve", "--root"] or str(project) in entry["args"]


def test_init_writes_the_token_for_http_and_says_so(home: Home, tmp_path: Path):
    done = call("init", str(tmp_path), "--agent", "claude", "--http", "--port", "9000", "--json")
    assert "do not commit" in " ".join(json.loads(done.stdout)["warnings"])
    entry = json.loads((tmp_path / ".mcp.json").read_text())["mcpServers"]["honesmith"]
    assert entry["url"] == "http://127.0.0.1:9000/mcp"
    assert entry["headers"]["Authorization"] == f"Bearer {home.token.read_text().strip()}"


def test_the_project_of_init_can_be_trained(home: Home, tmp_path: Path):
    assert call("init", str(tmp_path)).exit_code == 0
    assert load_toml(tmp_path / "train.toml").env == "first_env"


def test_init_writes_paths_without_detours_and_says_what_comes_next(home: Home, tmp_path: Path):
    (tmp_path / "a").mkdir()
    detour = tmp_path / "a" / ".." / "project"
    done = call("init", str(detour), "--agent", "claude,codex", "--json")
    project = tmp_path.resolve() / "project"
    for file in (".mcp.json", ".codex/config.toml"):
        text = (project / file).read_text()
        assert str(project) in text and ".." not in text
    (after,) = json.loads(done.stdout)["next"]
    assert after["arguments"] == {"path": str(project / "environments" / "first_env")}
    assert "edit tasks() and score()" in call("init", str(detour)).stdout
