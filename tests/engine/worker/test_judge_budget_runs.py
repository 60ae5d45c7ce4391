"""A run ends where its judge may be asked no more; until then it counts what the judge takes."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from loops import BASE, go, make_run, metrics, push

from engine.home.run_dir import Home
from engine.worker.core.failures import WorkerFailure

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]
ENV = """
from pathlib import Path
from envs import SingleTurnEnv, Task
from envs.judge import Judge, Rubric

FILE = Path(__file__).with_name("rubric.toml")

class Judged(SingleTurnEnv):
    rubric, judge = Rubric.from_file(FILE), Judge.from_file(FILE)
    def tasks(self):
        return [Task(str(n), f"Say {n}.", answer=str(n)) for n in range(40)]
    def score(self, task, completion):
        return self.rubric.score(task, completion, self.judge)

def load_environment():
    return Judged()
"""
RUBRIC = """
[judge]
url = "%s"
model = "fake"
prompt_price = 1000000

[[criteria]]
id = "kind"
description = "Is kind."
"""
FEW = {"steps": 2, "prompts_per_step": 2, "group_size": 2, "eval_rows": 2, "eval_every": 2}


class _Kind(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"prompt_tokens": 2, "total_tokens": 5}
        value = (sum(asked) % 10) / 10  # so that the answers of a group differ
        body = {"choices": [{"message": {"content": json.dumps({"kind": value})}}], "usage": usage}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Kind)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    place = tmp_path_factory.mktemp("judged")
    folder: Path = place / "judged"
    folder.mkdir()
    (folder / "rubric.toml").write_text(RUBRIC % f"http://127.0.0.1:{server.server_address[1]}/v1")
    (folder / "environment.toml").write_text("[limits]\nnetwork = true\n")
    home = Home.locate(place / "home")
    yield home, push(home, folder, ENV)
    server.shutdown()
    server.server_close()


def test_what_the_judge_takes_is_measured(judged: tuple[Home, str]) -> None:
    home, env_id = judged
    run = make_run(home, env_id, "grpo", BASE["grpo"] | FEW | {"score_workers": 2})
    go(run)
    step = metrics(run)[1]
    calls = step["judge_calls"]
    assert 1 <= calls <= 4  # an answer that was seen before is not asked about again
    assert (step["judge_tokens"], step["judge_cost"]) == (5 * calls, pytest.approx(2 * calls))
    assert step["judge_s"] > 0 and step["judge_retries"] == 0
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    told = next(event for event in events if event["event"] == "judge")
    assert told["calls"] >= calls and "judge calls" in told["message"]


@pytest.mark.parametrize("cap", [{"max_judge_calls": 3}, {"max_judge_cost": 5.0}])
def test_the_run_ends_where_its_judge_may_be_asked_no_more(
    judged: tuple[Home, str], cap: dict[str, float]
) -> None:
    home, env_id = judged
    name = next(iter(cap))
    run = make_run(home, env_id, "grpo", BASE["grpo"] | FEW | cap, run_id=name)
    with pytest.raises(WorkerFailure, match="may be asked no more") as failure:
        go(run)
    assert failure.value.kind == "budget" and name in str(failure.value)
    assert all(line.get("reward_errors", 0) == 0 for line in metrics(run))
