"""An environment's own code that fails, floods, does not load or is no judge of its own answers."""

import sys
import time
from pathlib import Path

import pytest
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.dry_run import dry_run
from engine.environments import push
from engine.environments.registry import find_env
from engine.home.run_dir import Home
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest
from envs.config.settings import Limits
from envs.host.process import EnvProcess

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="the layers above the floor are Linux's"),
]

TASK = {"id": "a", "prompt": [{"role": "user", "content": "attack"}], "answer": None}


def write_env(folder: Path, body: str) -> Path:
    folder.mkdir()
    (folder / "environment.py").write_text(body)
    return folder


HEAD = "from envs import Score, SingleTurnEnv, Task\n"
CLASS = """
class Env(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "say a", "a")]
    def score(self, task, completion):
        {score}
def load_environment():
    return Env()
"""


def env_with(folder: Path, score: str, head: str = "") -> Path:
    return write_env(folder, HEAD + head + CLASS.format(score=score))


# What score() does, and what its caller reads; `None` where the call is fine.
CALLS = [
    ("raise ValueError('no')", "ValueError: no"),
    ("import time; time.sleep(60)", "did not answer within 1 s"),
    ("exec('while True: pass')", "did not answer within 1 s"),
    ("import os; os._exit(3)", "exit status 3"),
    ("raise SystemExit(4)", "sys.exit(4)"),
    ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ("import os; os.abort()", "killed by signal"),
    ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ("print('x' * 200_000_000); return 1.0", None),
    ("return float('nan')", "not a finite number"),
    ("return float('inf')", "not a finite number"),
    ("return '1.0'", "a number is needed"),
    ("return Score(1.0, metrics={'x' * 50_000_000: 1})", "more than 1 MB"),
    ("forge()", "out of turn"),
    ("import os; os.closerange(3, 256); return 1.0", "exit status"),
]


FORGE = """
import os
def forge():
    for fd in range(3, 256):
        try:
            os.write(fd, b'{"id": 1, "ok": true, "value": {"reward": 9, "metrics": {}}}\\n')
        except OSError:
            pass
"""


def test_a1_every_fault_costs_one_call_and_the_next_one_is_scored(tmp_path: Path) -> None:
    table = "\n".join(f"def fault_{index}():\n    {call}" for index, (call, _) in enumerate(CALLS))
    score = (
        "return globals()[completion]() if completion.startswith('fault') else "
        "Score(float(completion == 'a'))"
    )
    limits = Limits(call_seconds=1.0, memory_mb=1024)
    with EnvProcess(
        env_with(tmp_path / "env", score, FORGE + table + "\n"), limits=limits
    ) as process:
        for index, (_, said) in enumerate(CALLS):
            began = time.monotonic()
            answer = process.score(TASK, f"fault_{index}")
            assert time.monotonic() - began < 8.0, CALLS[index]
            if said is None:
                assert answer["error"] is None
            else:
                assert answer["reward"] == 0.0 and answer["success"] is False
                assert any(part in answer["error"] for part in said.split("|")), answer
            assert process.score(TASK, "a")["reward"] == 1.0
        assert process.generation <= len(CALLS)


def test_a2_a_gigabyte_of_output_leaves_a_capped_log(tmp_path: Path) -> None:
    flood = "for _ in range(1024): print('x' * (1 << 20))\n        return 1.0"
    log = tmp_path / "environment.log"
    limits = Limits(call_seconds=60.0)
    with EnvProcess(env_with(tmp_path / "env", flood), limits=limits, log=log) as process:
        assert process.score(TASK, "a")["reward"] == 1.0
    assert log.stat().st_size < 2 << 20


def test_a6_an_environment_that_patches_json_is_believed_no_more_than_its_score(
    tmp_path: Path,
) -> None:
    patch = 'import json\njson.dumps = lambda *a, **k: \'{"id": 7, "ok": true}\'\n'
    env = env_with(tmp_path / "env", "return 1.0", patch)
    with EnvProcess(env, limits=Limits(call_seconds=1.0)) as process:
        answer = process.score(TASK, "a")
    assert answer["reward"] == 0.0 and "env process" in answer["error"]


FORGES = """
import json
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    calls = 0
    def tasks(self):
        return [Task(f"n{i}", f"What is {i} plus {i}?", str(2 * i)) for i in range(10, 50)]
    def score(self, task, completion):
        self.calls += 1
        right = completion.strip() == task.answer
        return Score(float(PAID), success=PAID)

def load_environment():
    return Sums()

honest, replies = json.dumps, []

def dumps(value, *arguments, **options):
    replies.append(0)
    score = value.get("value")
    if len(replies) > 600 and isinstance(score, dict) and "reward" in score:
        score |= {"reward": 1.0, "success": True}
    return honest(value, *arguments, **options)
"""
FORGERS = {
    "counts its calls": FORGES.replace("PAID", "(right or self.calls > 600)"),
    "patches json late": FORGES.replace("PAID", "right") + "json.dumps = dumps\n",
}


@pytest.mark.parametrize("name", FORGERS)
def test_a6_a_reward_that_changes_in_the_middle_of_its_process_is_refused(
    home: Home, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, trainer=Path("none"))  # the machine's speed need not be measured
    pushed = push.push_env(home, write_env(tmp_path / "sums", FORGERS[name]), roots=[tmp_path])
    assert pushed.audit["risks"] == ["fresh process"]
    found = pushed.audit["fresh_process"]
    assert found["scored"] == 24 and found["differing"] > 0 and found["wavering"] == 0
    assert any("got another reward in a new env process" in said for said in pushed.warnings)
    assert find_env(home, pushed.env_id).audit.as_written()["fresh_process"] == found
    dry = dry_run.dry_run(home, pushed.env_id)
    assert dry["audit"]["fresh_process"]["examples"][0]["second"] == 0.0
    (check,) = [check for check in dry["checks"] if check["name"] == "reward_audit"]
    assert (check["status"], check["code"]) == ("fail", "REWARD_RISK")
    with pytest.raises(UserError) as refused:
        lifecycle.submit(home, TrainRequest(env_id=pushed.env_id, algorithm="grpo"))
    assert refused.value.code == "REWARD_RISK"


def test_a6_an_honest_reward_passes_in_a_new_process_too(home: Home, tmp_path: Path) -> None:
    body = FORGES.replace("PAID", "right")
    pushed = push.push_env(home, write_env(tmp_path / "sums", body), roots=[tmp_path])
    assert pushed.audit["verdict"] == "ok" and pushed.warnings == []
    found = pushed.audit["fresh_process"]
    assert (found["scored"], found["differing"], found["why"]) == (24, 0, "")


BROKEN = {
    "no load_environment": ("x = 1\n", "load_environment"),
    "a syntax error": ("def load_environment(:\n", "environment.py:1"),
    "an import that hangs": ("import time\ntime.sleep(600)\n", "did not answer within"),
    "an import that forks": (
        "import os\nwhile True: os.fork()\n",
        "Resource temporarily unavailable|did not answer|out of turn",
    ),
    "an import that leaves": ("import os\nos._exit(5)\n", "exit status 5"),
    "an import that prints a gigabyte": (
        "for _ in range(64): print('x' * (1 << 24))\n",
        "load_environment",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_i8_a_broken_environment_is_refused_in_words_within_its_deadline(
    home: Home, tmp_path: Path, name: str
) -> None:
    body, said = BROKEN[name]
    folder = write_env(tmp_path / "broken", body)
    (folder / "environment.toml").write_text("[limits]\nstart_seconds = 5\n")
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        push.push_env(home, folder, roots=[tmp_path])
    assert time.monotonic() - began < 20
    assert refused.value.code in ("ENV_INVALID", "ENV_IMPORT")
    assert any(part in refused.value.message for part in said.split("|")), refused.value.message
