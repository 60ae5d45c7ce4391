"""A vLLM server as a child: how it is started, told apart, and gone with whoever started it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.machine.processes import vllm_process
from engine.machine.processes.vllm_process import (
    Plan,
    ServerDied,
    VllmProcess,
    command,
    rank_limit,
    variables,
)

pytestmark = pytest.mark.timeout(30)

FAKE = Path(__file__).parents[2] / "fake_vllm.py"


def plan(**values) -> Plan:
    known = {"device": "cpu", "dtype": "float32", "max_length": 512} | values
    return Plan(Path("/v/bin/python"), Path("/models/base"), **known)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """Starts a stand-in that behaves as told; what still lives at the end is stopped."""
    started: list[VllmProcess] = []

    def run(behave: str = "") -> VllmProcess:
        argv = [sys.executable, str(FAKE), behave]
        started.append(VllmProcess(plan(), tmp_path / "vllm.log", argv))
        return started[-1]

    yield run
    for process in started:
        process.stop()


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process], seconds: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def test_a_server_answers_and_leaves_nothing_when_it_is_stopped(start):
    process = start("family")
    process.wait_ready(20)
    assert process.healthy() and process.ready_s > 0
    assert process.folder.stat().st_mode & 0o077 == 0
    deadline = time.monotonic() + 10
    while len(living := family(process._keeper.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(living) == 2  # the server and the child that left its session
    process.stop()
    assert gone(living) and not process.folder.exists() and not process.healthy()


def test_it_dies_with_a_parent_that_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from engine.machine.processes.vllm_process import *\n"
        f"plan = Plan(Path('/v'), Path('/m'), 'cpu', 'float32', 64)\n"
        f"process = VllmProcess(plan, Path({str(tmp_path / 'log')!r}),"
        f" [sys.executable, {str(FAKE)!r}, 'family'])\n"
        "process.wait_ready(20); print(process.folder, process._keeper.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    folder, keeper = parent.stdout.readline().split()
    living = [psutil.Process(int(keeper)), *family(int(keeper))]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(living) and not Path(folder).exists()


def test_a_server_that_cannot_start_is_told_with_the_line_that_says_why(start):
    with pytest.raises(ServerDied, match="ValueError: no such dtype"):
        start("fail").wait_ready(20)


def test_a_program_that_does_not_exist_is_told(tmp_path):
    process = VllmProcess(plan(), tmp_path / "log", ["/no/such/python"])
    with pytest.raises(ServerDied, match="could not be started"):
        process.wait_ready(20)
    process.stop()


def test_patience_ends_and_so_does_the_server(start):
    process = start("slow")
    with pytest.raises(ServerDied, match="not ready after 0 s"):
        process.wait_ready(0.2)
    assert not process.is_alive


def test_whoever_waits_can_be_told_to_stop_waiting(start):
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start("slow").wait_ready(20, on_wait=stop)


def test_secrets_of_this_process_do_not_reach_the_server(start, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_API_TOKEN", "secret")
    start().wait_ready(20)
    named = (tmp_path / "vllm.log").read_text()
    assert "VLLM_API_KEY" in named and "MY_API_TOKEN" not in named and "PYTHONPATH" not in named


def test_the_command_asks_for_ids_in_and_the_probabilities_sampled_from():
    argv = " ".join(command(plan(lora_rank=12, adapters=2), Path("/tmp/s")))
    assert "/v/bin/python -P -m vllm.entrypoints.openai.api_server --model /models/base" in argv
    for part in (
        "--uds /tmp/s",
        "--dtype float32",
        "--max-model-len 512",
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-prefix-caching",
        "--enable-lora --max-lora-rank 16 --max-loras 2 --max-cpu-loras 3",
        "--no-enable-chunked-prefill --max-num-batched-tokens 4096",
    ):
        assert part in argv, part
    assert "--port" not in argv and "sleep" not in argv


def test_a_gpu_server_shares_the_device_and_can_sleep():
    asleep = plan(device="cuda", dtype="bfloat16", sleeps=True, memory=0.45)
    argv = command(asleep, Path("/tmp/s"))
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.450"
    assert "--enable-sleep-mode" in argv and "--no-enable-chunked-prefill" not in argv
    given = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "GPU-1", "HF_TOKEN": "x"}
    set_for = variables(asleep, "key", given)
    assert set_for["VLLM_SERVER_DEV_MODE"] == "1" and set_for["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert "HF_TOKEN" not in set_for


def test_a_server_with_gpus_to_itself_is_cut_and_copied_over_them():
    alone = plan(
        device="cuda",
        dtype="bfloat16",
        memory=0.9,
        visible="GPU-2,GPU-3,GPU-4,GPU-5",
        tensor_parallel=2,
        data_parallel=2,
    )
    line = " ".join(command(alone, Path("/tmp/s")))
    assert "--tensor-parallel-size 2 --data-parallel-size 2" in line and "sleep" not in line
    given = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert variables(alone, "key", given)["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3,GPU-4,GPU-5"


def test_developer_routes_exist_only_where_sleep_needs_them():
    found = variables(plan(), "key", dict(os.environ))
    assert "VLLM_SERVER_DEV_MODE" not in found
    assert found["VLLM_API_KEY"] == "key" and found["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("rank", "limit"), [(1, 8), (8, 8), (9, 16), (200, 256), (512, 512)])
def test_an_adapter_fits_under_the_next_bound_that_vllm_knows(rank, limit):
    assert rank_limit(rank) == limit


def test_no_bound_covers_a_rank_above_the_largest():
    with pytest.raises(ValueError, match="512"):
        rank_limit(513)


def test_the_last_words_are_the_last_error_or_the_last_line(tmp_path):
    log = tmp_path / "log"
    assert "nothing is in" in vllm_process.last_words(log)
    log.write_text("one\ntwo\n\n")
    assert vllm_process.last_words(log) == "two"
    aside = "(APIServer pid=3) WARNING 1 [x.py:1] this can cause OSError: too many files\n"
    log.write_text(f"(EngineCore pid=4) ERROR 1 [core.py:9] RuntimeError: worse\n{aside}bye\n")
    assert vllm_process.last_words(log) == "RuntimeError: worse"
