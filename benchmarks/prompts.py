"""Is a planted prompt found, and what is training from it worth against the plain one?

    python -m benchmarks.prompts FOLDER [smollm2|pebble] [--do search,train]

In a home of its own, through submit, supervisor and worker. The tasks are reviews to label without
a system message (smollm2), or sums under one that misleads (pebble). A scripted endpoint on
loopback writes two prompts that do not help, then one that does, then others. Told are the calls
and rollouts that the search took, the held-out success under the old prompt and the chosen one with
the interval of the change, and the same GRPO run from either prompt, compared task by task.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.environments import push
from engine.evidence.compare.compare import compare_runs
from engine.home.run_dir import Home
from engine.models import library
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

EXAMPLES = Path(__file__).resolve().parents[1] / "envs" / "examples"
OPEN = ("queued", "preparing", "running", "stopping")
GRPO = {"prompts_per_step": 8, "group_size": 4, "skill_rows": 0, "keep": 0, "seed": 0}
SUMS = """
from envs import Score, SingleTurnEnv, Task


class Sums(SingleTurnEnv):
    def tasks(self):
        system = {"role": "system", "content": "Reply in upper case."}
        return [
            Task(id=f"{a}+{b}", prompt=[system, {"role": "user", "content": f"What is {a} + {b}?"}],
                 answer=str(a + b), split="heldout" if (7 * a + 3 * b) % 3 == 0 else "train")
            for a in range(12) for b in range(12)
        ]

    def score(self, task, completion):
        said = completion.strip().removeprefix("The answer is ").removeprefix("Answer: ")
        right = said.rstrip(".") == str(task.answer)
        return Score(float(right), success=right, reason="" if right else "that is not the sum")


def load_environment():
    return Sums()
"""


@dataclass(frozen=True)
class Case:
    """What is searched for with one model.

    Attributes:
        source: the text of environment.py.
        params: what environment.toml says of it.
        written: what the endpoint writes, in this order; the planted prompt is the third.
    """

    source: str
    written: tuple[str, ...]
    params: Mapping[str, int] = field(default_factory=dict)
    search: Mapping[str, object] = field(default_factory=dict)
    grpo: Mapping[str, object] = field(default_factory=dict)


CASES: dict[str, Callable[[], Case]] = {
    "pebble": lambda: Case(
        SUMS,
        ("Repeat the question.", "Think about letters.", "You are an assistant.", "Add."),
        search={"max_tokens": 12, "select_rows": 24, "max_rollouts": 160, "max_calls": 6},
        grpo={"steps": 10, "eval_every": 10, "max_tokens": 12},
    ),
    "smollm2": lambda: Case(
        (EXAMPLES / "review_sentiment" / "environment.py").read_text("utf-8"),
        (
            "You are a polite assistant.",
            "Thank the customer first.",
            "You label reviews. Your whole answer is the word positive or the word negative.",
            "Be brief.",
        ),
        {"train_tasks": 120, "heldout_tasks": 60},
        search={"max_tokens": 6, "select_rows": 24, "max_rollouts": 120, "max_calls": 6},
        grpo={"steps": 4, "eval_every": 4, "max_tokens": 6},
    ),
}


@contextmanager
def scripted(written: tuple[str, ...]) -> Iterator[str]:
    """A chat endpoint on loopback that writes these prompts in turn; its URL."""
    count = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            prompt = written[next(count) % len(written)]
            message = {"role": "assistant", "content": f"```\n{prompt}\n```"}
            reply = {
                "choices": [{"message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 400, "completion_tokens": 40},
            }
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v1"
        finally:
            http.shutdown()


def finish(home: Home, request: TrainRequest) -> Mapping[str, Any]:
    """Do the run to its end and print what came of it; returns its status."""
    began = time.monotonic()
    run_id: str = lifecycle.submit(home, request)["run_id"]
    status: Mapping[str, Any] = {"state": "queued"}
    while status["state"] in OPEN:
        status = lifecycle.wait(home, run_id, "end", 45.0)
    if status["state"] != "done":
        raise SystemExit(f"{run_id}: {status['state']}: {status.get('error')}")
    print(f"{run_id} ({time.monotonic() - began:.0f} s): {status['summary']}", flush=True)
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", default="smollm2", choices=sorted(CASES))
    parser.add_argument("--do", default="search,train")
    given = parser.parse_args()
    case = CASES[given.model]()
    home = Home.locate(given.folder)
    if given.model != "pebble" and not (home.models / given.model).is_dir():
        library.add(home, given.model)
    folder = home.root / "sources" / f"told-{given.model}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.py").write_text(case.source)
    lines = [f"{name} = {value}" for name, value in case.params.items()]
    (folder / "environment.toml").write_text("\n".join(["[params]", *lines, ""]))
    plain = push.push_env(home, folder).env_id
    chosen = home.root / f"{given.model}-chosen.txt"
    if "search" in given.do:
        with scripted(case.written) as url:
            home.config_file.write_text(
                f'[endpoints.scripted]\nurl = "{url}"\nmodel = "s"\nprice_in = 1.0\nprice_out = 4\n'
            )
            settings = {"reflection": "openai:scripted", **case.search}
            status = finish(home, TrainRequest(plain, given.model, "prompt", settings))
        prompt = status["result"]["prompt"]
        print(json.dumps({**prompt, "endpoints": status["result"]["endpoints"]["total"]}, indent=1))
        chosen.write_text(prompt["env_id"])
    if "train" in given.do:
        settings = {**GRPO, **case.grpo}
        runs = [
            finish(home, TrainRequest(env, given.model, "grpo", settings))["run_id"]
            for env in (plain, chosen.read_text())
        ]
        print(compare_runs(home, runs)["summary"])


if __name__ == "__main__":
    main()
