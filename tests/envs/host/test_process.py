"""The env process: whatever user code does costs one sample, never the caller."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.host.pipe import REPLY_BYTES, Pipe
from envs.host.process import EnvProcess
from envs.isolation.packages import InstallOrder, packages_of
from envs.isolation.sandbox import Sandbox

QUICK = Limits(call_seconds=0.5)
SMALL = Limits(memory_mb=256)
TASK = {"id": "a", "prompt": [{"role": "user", "content": "say a"}], "answer": None}
TASK["answer"] = [{"role": "assistant", "content": "a"}]
TASK["text"] = ["prompt", "answer"]


def test_an_answer_is_scored(obedient: Path, start):
    process = start(obedient)
    assert process.describe() == {"kind": "single", "scored": True, "tools": []}
    right, wrong = process.score_many([(TASK, "a"), (TASK, "b")])
    assert (right["reward"], right["success"], right["error"]) == (1.0, True, None)
    assert (wrong["reward"], wrong["success"]) == (0.0, False)
    assert right["seconds"] > 0


def test_tasks_come_as_rows_that_json_holds(obedient: Path, start):
    rows = start(obedient).tasks()
    assert [row["id"] for row in rows] == ["a", "b"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "say a"}]
    assert rows[0]["answer"] == [{"role": "assistant", "content": "a"}]


# What score() does, what the caller is told, and whether the process has to be replaced.
FAULTS = {
    "raises": ("!1 / 0", "ZeroDivisionError", False),
    "raises with its line": ("!1 / 0", "environment.py:", False),
    "leaves": ("!import sys; sys.exit(3)", "sys.exit(3)", False),
    "is interrupted": ("!raise KeyboardInterrupt", "KeyboardInterrupt", False),
    "recurses": ("!f = lambda: g()\ng = lambda: f()\nf()", "RecursionError", False),
    "leaves at once": ("!import os; os._exit(4)", "exit status 4", True),
    "crashes": ("!import ctypes; ctypes.string_at(0)", "SIGSEGV", True),
    "is killed": ("!import os; os.kill(os.getpid(), 9)", "SIGKILL", True),
    "sleeps": ("!import time; time.sleep(60)", "did not answer within 0.5 s", True),
    "spins": ("!while True: pass", "did not answer within 0.5 s", True),
    "ignores signals": (
        "!import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)",
        "did not answer",
        True,
    ),
    "eats memory": ("!x = bytearray(1 << 30)", "MemoryError", False),
    "eats memory slowly": ("!x = []\nwhile True: x.append(bytearray(1 << 24))", "Memory", False),
    "fills the disk": ("!open('f', 'wb').write(bytes(100 << 20))", "File too large", False),
    "gives NaN": ("!score = float('nan')", "the reward is nan", False),
    "gives infinity": ("!score = float('-inf')", "the reward is -inf", False),
    "gives text": ("!score = '1.0'", "of type str", False),
    "gives nothing": ("!score = None", "None", False),
    "gives a long number": ("!score = 10 ** 400", "OverflowError", False),
    "gives a bad metric": (
        "!from envs import Score\nscore = Score(1.0, metrics={'m': float('nan')})",
        "the metric 'm' is nan",
        False,
    ),
    "gives a text as success": (
        "!from envs import Score\nscore = Score(1.0, success='yes')",
        "Score.success",
        False,
    ),
    "gives many metrics": (
        "!from envs import Score\nscore = Score(1.0, metrics={str(i): i for i in range(99)})",
        "at most 64",
        False,
    ),
    "answers too much": (
        "!from envs import Score\nscore = Score(1.0, metrics={'x' * 2**21: 1})",
        f"more than {REPLY_BYTES >> 20} MB",
        True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_one_sample(name: str, obedient: Path, start):
    completion, said, replaced = FAULTS[name]
    process: EnvProcess = start(obedient, QUICK if "did not answer" in said else SMALL)
    process.describe()
    score = process.score(TASK, completion)
    assert score["reward"] == 0.0 and score["success"] is False
    assert said in score["error"]
    assert process.score(TASK, "a")["reward"] == 1.0
    assert process.generation == (2 if replaced else 1)


def test_an_error_that_the_environment_reports_counts_as_one(obedient: Path, start):
    said = "!from envs import Score\nscore = Score(0.7, error='judge is down')"
    assert start(obedient).score(TASK, said) == {
        "reward": 0.0,
        "success": False,
        "metrics": {},
        "error": "judge is down",
        "seconds": pytest.approx(0, abs=5),
    }


def test_a_bare_number_and_numbers_like_it_are_scores(obedient: Path, start):
    process = start(obedient)
    assert process.score(TASK, "!score = 1")["reward"] == 1.0
    assert process.score(TASK, "!from fractions import Fraction\nscore = Fraction(1, 4)")[
        "reward"
    ] == pytest.approx(0.25)
    metrics = process.score(
        TASK, "!from envs import Score\nscore = Score(2, success=True, metrics={'m': True})"
    )
    assert (metrics["reward"], metrics["metrics"]) == (2.0, {"m": 1.0})


@pytest.mark.parametrize("completion", ["", "\0", "\ud800", "\u2028", '"}\n{"id": 1}', "é" * 70000])
def test_any_text_can_be_scored(completion: str, obedient: Path, start):
    assert start(obedient).score(TASK, completion)["error"] is None


def test_a_huge_print_goes_into_a_capped_log(obedient: Path, start, tmp_path: Path):
    log = tmp_path / "env.log"
    process = start(obedient, log=log)
    assert (
        process.score(TASK, "!print('begin')\nfor _ in range(40): print('x' * 2**20)")["error"]
        is None
    )
    assert process.score(TASK, "a")["reward"] == 1.0
    process.close()
    text = log.read_text()
    assert text.startswith("begin\n") and "is dropped" in text
    assert len(text) < 2 << 20


def test_many_short_lines_stop_at_the_cap_too(obedient: Path, start, tmp_path: Path):
    log = tmp_path / "env.log"
    process = start(obedient, log=log)
    process.score(TASK, "!print('line\\n' * 400_000)")
    process.close()
    assert log.stat().st_size < (1 << 20) + 100
    assert "dropped" in log.read_text()[-100:]


def test_the_last_words_of_a_crash_are_told(obedient: Path, start):
    error = start(obedient).score(TASK, "!import os\nos.write(2, b'so long\\n')\nos._exit(7)")
    assert "so long" in error["error"]


def test_writing_to_the_standard_output_does_not_disturb_the_replies(obedient: Path, start):
    process = start(obedient)
    forged = json.dumps({"id": 1, "ok": True, "value": {"reward": 99.0}})
    for fd in (1, 2):
        done = process.score(TASK, f"!import os; os.write({fd}, {forged!r}.encode() + b'\\n')")
        assert done["reward"] == 0.0
    assert process.score(TASK, "a")["reward"] == 1.0


def test_a_reply_written_behind_our_back_is_not_believed(obedient: Path, start):
    forge = (
        "!import os, json\nline = json.dumps({'id': 5, 'ok': True, 'value': {'reward': 99.0, "
        "'success': True, 'metrics': {}}}).encode() + b'\\n'\n"
        "for fd in range(3, 2000):\n    try: os.write(fd, line)\n    except OSError: pass"
    )
    process = start(obedient, QUICK)
    score = process.score(TASK, forge)
    assert score["reward"] == 0.0 and "out of turn" in score["error"]
    assert process.score(TASK, "a")["reward"] == 1.0


def test_a_fork_that_runs_on_does_not_answer(obedient: Path, start):
    process = start(obedient)
    assert process.score(TASK, "!import os\nos.fork()")["error"] is None
    assert [process.score(TASK, text)["reward"] for text in ("a", "b", "a")] == [1.0, 0.0, 1.0]
    assert process.generation == 1


@pytest.fixture
def starts(monkeypatch) -> list[int]:
    """One entry per process that was started."""
    made: list[int] = []
    plain = subprocess.Popen

    class Counted(plain):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            made.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    return made


def test_an_environment_that_cannot_be_loaded_is_started_once(write_env, start, starts):
    process = start(write_env("raise ValueError('no')\ndef load_environment(): ...\n"))
    for _ in range(5):
        score = process.score(TASK, "a")
        assert score["reward"] == 0.0 and "ValueError: no" in score["error"]
    assert len(starts) == 1


def test_an_import_that_hangs_is_given_up_after_three_starts(write_env, start, starts):
    folder = write_env("import time\ntime.sleep(60)\ndef load_environment(): ...\n")
    process = start(folder, Limits(start_seconds=0.2))
    for _ in range(6):
        assert "importing the environment" in process.score(TASK, "a")["error"]
    assert len(starts) == 3


def test_an_interpreter_that_does_not_exist_is_an_error_text(obedient: Path, start):
    process = start(obedient, python="/no/such/python")
    assert "/no/such/python does not start" in process.score(TASK, "a")["error"]


def test_an_interpreter_that_is_none_says_so(obedient: Path, start):
    error = start(obedient, python="/bin/false").score(TASK, "a")["error"]
    assert "holds no packages for Python" in error


def test_several_threads_may_share_one_process(obedient: Path, start):
    process = start(obedient)
    results: list[float] = []

    def work(text: str) -> None:
        results.extend(process.score(TASK, text)["reward"] for _ in range(20))

    threads = [threading.Thread(target=work, args=(text,)) for text in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0.0] * 40 + [1.0] * 40


def test_closing_twice_and_using_it_again_is_fine(obedient: Path, start):
    process = start(obedient)
    assert process.score(TASK, "a")["reward"] == 1.0
    process.close()
    process.close()
    assert process.pid is None
    assert process.score(TASK, "a")["reward"] == 1.0


def test_its_folders_are_gone_afterwards(obedient: Path, start, tmp_path: Path, monkeypatch):
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    process = start(obedient)
    process.score(TASK, "!open('left', 'w').write('x')")
    assert len(os.listdir(place)) == 1
    process.close()
    assert os.listdir(place) == []


FORGED = """
import sys
class Env(SingleTurnEnv):
    def tasks(self):
        frame = sys._getframe()
        while "request_id" not in frame.f_locals:
            frame = frame.f_back
        ident, host = frame.f_locals["request_id"], frame.f_locals["self"]
        rows = {rows!r}
        for row in rows:
            host.send_reply({{"id": ident, "row": row}})
        host.send_reply({{"id": ident, "ok": True, "value": len(rows)}})
        os._exit(0)

    def score(self, task, completion):
        return 1.0
"""


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "sent 0 tasks"),
        ([TASK, TASK], "share the id 'a'"),
        ([TASK, 5], "tasks()[1] is no task"),
        ([{**TASK, "text": ["half"]}], "is no task"),
        ([{**TASK, "prompt": [], "text": ["prompt"]}], "is no task"),
        ([{**TASK, "metadata": {"x": "\ud800"}}], "half of a surrogate pair"),
        ([{**TASK, "metadata": {"x": float("nan")}}], "is no task"),
    ],
)
def test_rows_that_no_task_would_write_are_refused(write_env, start, rows: list, said: str):
    body = FORGED.format(rows=rows).replace("nan", "float('nan')")
    with pytest.raises(EnvProblem) as caught:
        start(write_env(body)).tasks()
    assert caught.value.code == "ENV_INVALID"
    assert said in caught.value.message or "not JSON" in caught.value.message


def test_a_row_is_taken_as_its_task_writes_it(write_env, start):
    row = {**TASK, "prompt": "say a", "text": [], "gold": 5, "half": "report"}
    assert start(write_env(FORGED.format(rows=[row]))).tasks() == [
        {**TASK, "split": None, "metadata": {}, "text": ["prompt"]}
    ]


def test_a_code_of_a_problem_that_nobody_knows_is_not_believed():
    odd = {"code": {"x": 1}, "message": 5, "hint": [], "file": 7, "line": True}
    problem = EnvProblem.from_dict(odd)
    assert (problem.code, problem.line) == ("ENV_INVALID", 0)
    assert EnvProblem.from_dict({"code": "INTERNAL"}).code == "ENV_INVALID"


def test_what_pip_is_told_stands_in_no_argument_of_a_process(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    target.mkdir()
    secret = "https://name:password-of-the-index@host/simple"
    order = InstallOrder(("x==1",), str(target), str(tmp_path), {"PIP_INDEX_URL": secret})
    pipe = Pipe(tmp_path, packages_of(sys.executable), Limits(), {}, None, Sandbox(), order)
    try:
        assert b"password" not in Path(f"/proc/{pipe.parent.pid}/cmdline").read_bytes()
    finally:
        pipe.close()
