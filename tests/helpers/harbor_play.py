"""Harbor tasks written on the spot, and a model with a script that plays them."""

import json
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mini_container
import pytest

from envs.config.settings import read_settings
from envs.host.command import Commands, Ending, score_of
from envs.host.process import EnvProcess
from envs.isolation import landlock
from envs.isolation.sandbox import Sandbox
from envs.json_types import ScoreReply

boxed = pytest.mark.skipif(
    landlock.abi() == 0 or not mini_container.possible(),
    reason="no Landlock and namespaces, in which an agent's commands could run here",
)
TOML = """
[adapter]
kind = "harbor"

[rollout]
seconds = 30

[limits]
processes = 128
"""
TASK = """
version = "1.0"

[environment]
docker_image = "debian:12"
"""
# Pays what the agent wrote into /app/answer.
TEST = """
if [ "$(cat /app/answer)" = "$(cat /tests/expected)" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""


def write_task(root: Path, name: str = "answer", **files: str) -> Path:
    """Write a task below `root`; `files` are by path with __ for / and ___ for a dot. What is not
    given is a task that asks for the word in /tests/expected."""
    folder = root / name
    texts = {
        "instruction.md": "Write the word into /app/answer.",
        "task.toml": TASK,
        "tests/test.sh": TEST,
        "tests/expected": "blue",
        "solution/solve.sh": "echo blue > /app/answer",
    }
    texts |= {path.replace("___", ".").replace("__", "/"): text for path, text in files.items()}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(textwrap.dedent(text))
    return folder


def write_folder(folder: Path, toml: str = TOML, **files: str) -> Path:
    """Write an environment with one task, `answer`."""
    write_task(folder / "tasks", **files)
    (folder / "environment.toml").write_text(textwrap.dedent(toml))
    return folder


class Model(ThreadingHTTPServer):
    """A model that runs these commands one after the other and then says that it is done.

    Attributes:
        asked: the body of each question.
        refuse_after: how many questions it takes before it answers 400, as a gateway does.
    """

    daemon_threads = True

    def __init__(self, commands: Sequence[str], blocks: bool = False, **options: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, **options)
        self.commands = commands
        self.blocks = blocks
        self.asked: list[Any] = []
        self.refuse_after = 1000

    @property
    def told(self) -> list[str]:
        """What the model was told of each of its commands."""
        messages = self.asked[-1]["messages"] if self.asked else []
        return [m["content"] for m in messages[2:] if m["role"] in ("tool", "user")]


class _Handler(BaseHTTPRequestHandler):
    server: Model

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model = self.server
        number = len(model.asked)
        model.asked.append(body)
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if number < len(model.commands) and model.blocks:
            message["content"] = f"I run this.\n```bash\n{model.commands[number]}\n```"
        elif number < len(model.commands):
            arguments = json.dumps({"command": model.commands[number]})
            function = {"name": "bash", "arguments": arguments}
            call = {"id": f"call{number}", "type": "function", "function": function}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        data = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(400 if number >= model.refuse_after else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(model: Model) -> Iterator[Model]:
    """A context in which the model answers."""
    threading.Thread(target=model.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield model
    finally:
        model.shutdown()
        model.server_close()


def played(
    folder: Path, commands: Sequence[str], *, task: str = "answer", blocks: bool = False
) -> tuple[ScoreReply, Model, Ending]:
    """Play one rollout of a folder's task in its box, with a model that runs `commands`."""
    settings = read_settings(folder)
    assert settings.rollout is not None
    with closing(EnvProcess(folder)) as process:
        row = next(row for row in process.tasks() if row["id"] == task)
    todo = Commands(folder, settings.rollout, sys.executable, settings.limits, {}, None, Sandbox())
    with closing(todo.start()) as run:
        model = Model(commands, blocks, bind_and_activate=False)
        model.socket.close()
        model.socket = run.listener.dup()
        with serving(model):
            names = {
                "OPENAI_BASE_URL": f"{run.base_url}/v1",
                "OPENAI_API_KEY": "key-of-the-rollout",
                "OPENAI_MODEL": "m",
            }
            run.begin(row, names)
            ending = run.wait()
        return score_of(settings.rollout, ending), model, ending
