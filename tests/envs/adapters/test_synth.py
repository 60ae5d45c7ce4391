"""Task apps over HTTP, in Node: their seeds are tasks, and each rollout asks its own gateway."""

import json
import shutil
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from envs.config.settings import read_settings
from envs.host.command import Commands, Ending, score_of
from envs.isolation.sandbox import Sandbox
from envs.json_types import ScoreReply

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed"),
]

TOML = """
    [adapter]
    kind = "synth"
    server = ["node", "app.mjs"]
    size = 12
    env_name = "sums"

    [limits]
    memory_mb = 65536
    call_seconds = 60
    """
APP = """
    import http from "node:http";

    async function rollout(asked) {
      const seed = asked.env.seed;
      const config = asked.policy.config;
      const reply = await fetch(config.inference_url.replace(/\\/$/, "") + "/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", Authorization: `Bearer ${config.api_key}` },
        body: JSON.stringify({
          model: config.model,
          messages: [{ role: "user", content: `Add ${seed} and 1.` }],
        }),
      });
      const text = (await reply.json()).choices[0].message.content;
      const reward = text.trim() === String(seed + 1) ? 1 : 0;
      return { run_id: asked.run_id, metrics: { outcome_reward: reward, num_steps: 1 } };
    }

    http.createServer((request, response) => {
      const url = new URL(request.url, "http://localhost");
      const send = (value) => response.end(JSON.stringify(value));
      if (url.pathname === "/health") return send({ healthy: true });
      if (url.pathname === "/task_info") {
        const seed = Number(url.searchParams.get("seed"));
        return send([{ task: { name: "Sums" }, observation: { first: seed } }]);
      }
      let body = "";
      request.on("data", (part) => (body += part));
      request.on("end", () =>
        rollout(JSON.parse(body)).then(send, (error) => {
          response.statusCode = 502;
          send({ detail: String(error) });
        })
      );
    }).listen(Number(process.env.PORT), "127.0.0.1");
    """


class Model(BaseHTTPRequestHandler):
    """A model that answers every question with 4, to whoever has its key."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.headers["Authorization"], body))  # type: ignore[attr-defined]
        answer = {"choices": [{"message": {"role": "assistant", "content": "4"}}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def app(write_folder) -> Path:
    return write_folder(TOML, {"app.mjs": APP})


def played(folder: Path, task: dict[str, Any], sandbox: Sandbox) -> tuple[ScoreReply, list[Any]]:
    """The score of one rollout, and what the model was asked."""
    settings = read_settings(folder)
    assert settings.rollout is not None
    commands = Commands(
        folder, settings.rollout, sys.executable, settings.limits, {}, None, sandbox
    )
    with closing(commands.start()) as run, ThreadingHTTPServer(("", 0), Model, False) as server:
        server.socket.close()
        server.socket = run.listener.dup()
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        names = {
            "OPENAI_BASE_URL": f"{run.base_url}/v1",
            "OPENAI_API_KEY": "k",
            "OPENAI_MODEL": "m",
        }
        run.begin(task, names)
        ending: Ending = run.wait()
        server.shutdown()
        return score_of(settings.rollout, ending), server.asked  # type: ignore[attr-defined]


def test_the_seeds_of_an_app_are_tasks(app: Path, start):
    process = start(app)
    rows = process.tasks()
    assert process.describe()["kind"] == "command" and len(rows) == 12
    assert rows[3]["metadata"] == {"seed": 3}
    assert rows[3]["prompt"][0]["content"] == 'Sums (seed 3)\n{"first": 3}'
    assert "no network but its own server" in process.isolation


def test_a_rollout_asks_its_gateway_and_earns_what_the_app_says(app: Path, start):
    rows = start(app).tasks()
    for row, reward in ((rows[3], 1.0), (rows[5], 0.0)):
        score, asked = played(app, row, Sandbox())
        assert (score["error"], score["reward"]) == (None, reward)
        assert score["metrics"] == {"steps": 1.0}
        ((key, body),) = asked
        assert key == "Bearer k" and body["model"] == "m"


FAULTS = {
    "process.exit(7)": "the server left with exit status 7",
    "return {}": "the answer of /rollout has no metrics",
    "return { metrics: {} }": "the metrics of /rollout have no outcome_reward",
    'throw "broken"': "answered 502",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_app_that_fails_costs_its_rollout_and_says_why(fault: str, app: Path, start):
    code = (app / "app.mjs").read_text()
    at = "async function rollout(asked) {\n"
    start_of_app = fault.startswith("process")
    (app / "app.mjs").write_text(
        f"{fault};\n{code}" if start_of_app else code.replace(at, f"{at}{fault};\n")
    )
    score, _ = played(app, {"id": "a", "metadata": {"seed": 1}}, Sandbox())
    assert score["reward"] == 0.0 and FAULTS[fault] in str(score["error"])
