"""Names and paths from clients: none becomes a command, none leads out of where it may."""

import ast
import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from answered import SUMS, push
from mcp import Client

from engine.home.run_dir import Home
from mcp_server.protocol.app import build_server

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("mcp_server", "playbook", "engine", "envs")

PATHS = [
    "..",
    "../",
    "../outside",
    "inside/../../outside",
    "../project-evil/env",
    "/",
    "/etc",
    "/etc/passwd",
    "~",
    "~root",
    "~/.ssh",
    "file:///etc",
    "file:inside",
    "\0",
    "inside\0/x",
    "link",
    "link/",
    "link/passwd",
    "x" * 5_000,
    "/".join(["x" * 200] * 40),
    "inside/" + "../" * 40,
    "//etc",
    "/proc/self/root/etc",
    "/proc/self/cwd/../..",
    "C:\\",
    "\\\\host\\x",
    "-rf",
    "",
    " ",
]
NAMES = [
    "a;b",
    "$(id)",
    "`id`",
    "-rf",
    "--help",
    "a b",
    "a\nb",
    "a\tb",
    "A",
    "аrith",
    "ａｒｉｔｈ",
    "a/b",
    "../a",
    "..",
    ".",
    ".hidden",
    "a" * 41,
    "a\0b",
    "a\u202eb",
    "a\u200bb",
    "",
    "a@b",
    "a%2fb",
    "é",
    "con\r",
    "'",
    '"',
    "|",
    "&",
    ">",
    "*",
    "?",
    "{a,b}",
    "~",
    "!",
]


async def told(client: Client, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    return json.loads(result.content[0].text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A root with a link out of it and a sibling whose name begins like its own."""
    root = tmp_path / "project"
    (root / "inside").mkdir(parents=True)
    for place in ("outside", "project-evil/env"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "environment.py").write_text(SUMS)
    (root / "link").symlink_to("/etc")
    return root


async def test_i5_no_path_of_a_client_leads_out_of_the_roots(home: Home, project: Path):
    outside = [path for path in project.parent.rglob("*") if home.root not in path.parents]
    async with Client(build_server(home, [project])) as client:
        for path in PATHS:
            pushed = await told(client, "push_env", {"path": path})
            assert pushed.get("code") in ("PATH_OUTSIDE_ROOTS", "BAD_ARGUMENT", "ENV_INVALID"), (
                path[:40],
                pushed,
            )
            assert "root:x" not in json.dumps(pushed)
            plan = {"run_id": "nobody", "action": "export", "path": path}
            exported = await told(client, "deploy", plan)
            assert exported.get("code") in (
                "PATH_OUTSIDE_ROOTS",
                "BAD_ARGUMENT",
                "MODEL_NOT_FOUND",
            ), (path[:40], exported)
        listed = await told(client, "get_status", {"scope": "envs"})
    assert listed["envs"] == []
    assert [path for path in project.parent.rglob("*") if home.root not in path.parents] == outside


async def test_i5_an_export_through_a_link_out_of_the_roots_is_refused(home: Home, project: Path):
    async with Client(build_server(home, [project])) as client:
        for path in ("link/out", "../project-evil/out", str(project.parent / "out")):
            plan = {"run_id": "nobody", "action": "export", "path": path}
            assert (await told(client, "deploy", plan))["code"] == "PATH_OUTSIDE_ROOTS", path


async def test_i6_a_name_is_small_letters_and_nothing_a_shell_knows(home: Home, project: Path):
    (project / "inside" / "environment.py").write_text(SUMS)
    async with Client(build_server(home, [project])) as client:
        for name in NAMES:
            if name == "":  # means the folder's own
                continue
            said = await told(client, "push_env", {"path": "inside", "name": name})
            assert said["code"] == "BAD_ARGUMENT" and said["field"] == "name", (name, said)
            for tool, given in (
                ("wait_run", {"run_id": name, "timeout_s": 0}),
                ("read_logs", {"run_id": name}),
                ("cancel_run", {"run_id": name}),
                ("estimate_cost", {"env_id": name}),
                ("curate", {"source_ids": [name], "name": name}),
            ):
                said = await told(client, tool, given)
                code = said.get("code", "")
                assert code.endswith("_NOT_FOUND") or code == "BAD_ARGUMENT", (tool, name, said)
    assert not list(home.envs.iterdir()) and not list(home.runs.iterdir())


def calls() -> list[tuple[Path, ast.Call]]:
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    found.append((path, node))
    return found


def test_i6_no_shell_is_started_anywhere():
    bad = []
    for path, call in calls():
        name = ast.unparse(call.func)
        if name in ("os.system", "os.popen", "commands.getoutput", "subprocess.getoutput"):
            bad.append(f"{path}:{call.lineno} {name}")
        for keyword in call.keywords:
            if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                bad.append(f"{path}:{call.lineno} shell=")
    assert bad == []


async def test_i7_an_archive_is_no_environment_and_is_never_unpacked(home: Home, project: Path):
    evil = project.parent / "escaped"
    with tarfile.open(project / "env.tar.gz", "w:gz") as tar:
        for name in ("../../escaped", "/tmp/escaped", "environment.py"):
            tar.addfile(tarfile.TarInfo(name))
    with zipfile.ZipFile(project / "env.zip", "w") as packed:
        packed.writestr("../../escaped", "x")
    async with Client(build_server(home, [project])) as client:
        for name in ("env.tar.gz", "env.zip"):
            said = await told(client, "push_env", {"path": name})
            assert said["code"] == "ENV_INVALID", said
        (project / "inside" / "environment.py").write_text(SUMS)
        (project / "inside" / "more.tar.gz").write_bytes((project / "env.tar.gz").read_bytes())
        pushed = await told(client, "push_env", {"path": "inside"})
        source = await client.read_resource(f"env://{pushed['env_id']}/source")
    assert pushed["files"] == 2 and "more.tar.gz" in source.contents[0].text
    assert not evil.exists() and not Path("/tmp/escaped").exists()


async def test_i7_names_that_clash_in_case_stay_two_files(home: Home, project: Path):
    folder = project / "inside"
    (folder / "environment.py").write_text(SUMS)
    (folder / "data.txt").write_text("one")
    (folder / "DATA.txt").write_text("two")
    env_id = push(home, folder)
    stored = home.env("sums", env_id.partition("@")[2]) / "source"
    assert (stored / "data.txt").read_text() == "one"
    assert (stored / "DATA.txt").read_text() == "two"


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


async def test_i9_a_model_that_is_none_is_refused_with_the_reason(home: Home, tmp_path: Path):
    push(home, tmp_path / "env")
    pickled, remote, empty = (tmp_path / name for name in ("pickled", "remote", "empty"))
    for folder in (pickled, remote, empty):
        folder.mkdir()
    (pickled / "config.json").write_text(json.dumps(CONFIG))
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    own = CONFIG | {
        "model_type": "mine",
        "architectures": ["MineForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
    }
    (remote / "config.json").write_text(json.dumps(own))
    (remote / "modeling_mine.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    async with Client(build_server(home, [tmp_path])) as client:
        for model in (
            str(pickled),
            str(remote),
            str(empty),
            "/etc",
            "/etc/passwd",
            "..",
            "../..",
            "~root",
            "a/../../b",
            "file:///etc",
            "\0",
            "x" * 5_000,
        ):
            for tool in ("dry_run", "estimate_cost", "submit_train"):
                plan = {"env_id": "sums", "model": model, "algorithm": "sft"}
                said = await told(client, tool, plan)
                checks = [check for check in said.get("checks", []) if check["status"] == "fail"]
                code = said.get("code") or ("checks" if checks else "")
                assert code in ("MODEL_NOT_FOUND", "MODEL_UNSUPPORTED", "BAD_ARGUMENT", "checks"), (
                    tool,
                    model[:60],
                    said,
                )
        listed = await told(client, "get_status", {"scope": "runs"})
    assert listed["runs"] == [] and not (tmp_path / "owned").exists()
    assert not os.path.exists(tmp_path / "owned")


def test_i9_code_of_a_model_is_never_trusted():
    given = [
        f"{path}:{call.lineno}"
        for path, call in calls()
        for keyword in call.keywords
        if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
    ]
    assert given == []
