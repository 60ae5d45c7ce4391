"""A vLLM server as a child process: started from vLLM's own environment, ended when this process
ends.

The server listens on a socket file in a private folder, not on a port. Some of its routes run code
for whoever reaches them, and its key protects only a part of the others; so only this user may
reach it. Between this process and the server there is a keeper (`python -P -m
engine.machine.processes.vllm_process`), which reads a pipe whose other end is here. When that end
closes, however this process ended, the keeper kills every process of the server and removes the
folder.

This module imports the standard library and light modules of ours, neither torch nor vLLM.
"""

import contextlib
import http.client
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.files import read_tail
from envs.isolation import kernel

BASE = "base"  # the name of the base model, without an adapter
# The values that vLLM accepts as the maximum rank of adapters.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
KEEPER = (sys.executable, "-P", "-m", "engine.machine.processes.vllm_process")
START_S = 600.0  # time to start: importing vLLM takes 30 s on two idle cores, minutes on busy ones
STOP_S = 5.0  # seconds that a server has to end after a signal
POLL_S = 0.1  # seconds between two health checks
# The beginning of a log line, e.g. "(Worker pid=7) ERROR 01-01 [core.py:3] ".
_LOG_PREFIX = re.compile(r"^(\([^)]*\) )?[A-Z]+ [^\]]*\] ")
_HARMLESS_LEVEL = re.compile(r"(^|\) )(DEBUG|INFO|WARNING) ")  # log levels that explain no crash
# The environment variables of this process that a server inherits. None of them is a secret.
_PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
)


class ServerDied(Exception):
    """The server ended, or did not become ready in time; the message has its last log line."""


@dataclass(frozen=True)
class Plan:
    """How to run a server.

    Attributes:
        python: an interpreter whose environment has vLLM.
        model: the base model's folder.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16", for weights and arithmetic.
        max_length: the most tokens of prompt and completion together.
        rows: how many completions may be generated at once.
        lora_rank: the largest rank of an adapter; 0 for no adapters.
        adapters: how many adapters can answer at once.
        sleeps: whether it can release its memory between uses (CUDA only).
        memory: on a CPU the bytes for the key-value cache; on a GPU the share of its memory, 0 to
            1.
        threads: how many threads a CPU server uses.
        visible: its value of CUDA_VISIBLE_DEVICES; "" for that of this process.
        tensor_parallel: over how many GPUs each weight is split.
        data_parallel: how many copies of the model, each on GPUs of its own, share the requests.
    """

    python: Path
    model: Path
    device: str
    dtype: str
    max_length: int
    rows: int = 256
    lora_rank: int = 16
    adapters: int = 1
    sleeps: bool = False
    memory: float = 1_073_741_824
    threads: int = 1
    visible: str = ""
    tensor_parallel: int = 1
    data_parallel: int = 1


def rank_limit(rank: int) -> int:
    """Return the smallest limit in RANKS that is at least `rank`. Raises ValueError for a rank
    above 512."""
    for limit in RANKS:
        if rank <= limit:
            return limit
    raise ValueError(f"vLLM takes adapters up to rank {RANKS[-1]}, not {rank}")


def command(plan: Plan, address: Path) -> list[str]:
    """Return the command line of a vLLM server that runs as `plan` says and listens on the socket
    file `address`."""
    argv = [str(plan.python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(plan.model), "--served-model-name", BASE]
    argv += ["--uds", str(address), "--disable-uvicorn-access-log"]
    argv += ["--dtype", plan.dtype, "--max-model-len", str(plan.max_length)]
    argv += ["--max-num-seqs", str(plan.rows)]
    # This option allows token ids in requests and answers.
    argv += ["--enable-scale-out"]
    # Return log-probabilities of the distribution that is sampled from, including temperature.
    argv += ["--logprobs-mode", "processed_logprobs"]
    # Ignore the model's own sampling defaults.
    argv += ["--generation-config", "vllm"]
    argv += ["--enable-prefix-caching"]
    return [*argv, *_adapter_options(plan), *_device_options(plan)]


def _adapter_options(plan: Plan) -> list[str]:
    """Return the server's options for LoRA adapters; [] if the plan has none."""
    if not plan.lora_rank:
        return []
    argv = ["--enable-lora", "--max-lora-rank", str(rank_limit(plan.lora_rank))]
    # One more on the CPU, because a new version is loaded before the old one is removed.
    return [*argv, "--max-loras", str(plan.adapters), "--max-cpu-loras", str(plan.adapters + 1)]


def _device_options(plan: Plan) -> list[str]:
    """Return the command-line options of a vLLM server for the device that it runs on: memory and
    compilation, and on GPUs how many of them it uses."""
    if plan.device == "cpu":
        # On a CPU a seeded request whose prompt is read in parts crashes the engine ("CPU Generator
        # does not use offset"), so prompts are read in one part.
        batch_tokens = max(plan.max_length, 4096)
        argv = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batch_tokens)]
        return [*argv, "--enforce-eager"]  # compiling gains nothing there
    argv = ["--gpu-memory-utilization", f"{plan.memory:.3f}"]
    argv += ["--enable-sleep-mode"] if plan.sleeps else []
    if plan.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    if plan.data_parallel > 1:
        argv += ["--data-parallel-size", str(plan.data_parallel)]
    return argv


def variables(plan: Plan, key: str, own_variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the server's process.

    These are the variables of this process that it needs, and vLLM's own.

    Args:
        plan: how to run the server.
        key: the key that requests to the server must carry.
        own_variables: the variables of this process.
    """
    passed_on = {
        name: value
        for name, value in own_variables.items()
        if name in _PASSED_ON or name.startswith(("NVIDIA_", "NCCL_"))
    }
    result = passed_on | {
        "VLLM_API_KEY": key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # adapters are loaded while it serves
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing may be fetched
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if plan.sleeps:
        # This enables /sleep and /wake_up, on a socket that only this user can open.
        result["VLLM_SERVER_DEV_MODE"] = "1"
    if plan.visible:
        result["CUDA_VISIBLE_DEVICES"] = plan.visible
    if plan.device == "cpu":
        result |= _cpu_variables(plan)
    return result


def _cpu_variables(plan: Plan) -> dict[str, str]:
    """Return the environment variables for a server that computes on the CPU."""
    return {
        "CUDA_VISIBLE_DEVICES": "",  # no GPU
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(plan.memory / 2**30))),  # in GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads may run on any core
        "OMP_NUM_THREADS": str(plan.threads),
        "GOMP_SPINCOUNT": "10000",  # spinning OpenMP threads starve each other on few cores
    }


class VllmProcess:
    """A server that is starting or runs; call `wait_ready` before sending it anything."""

    def __init__(self, plan: Plan, log: Path, argv: Sequence[str] = ()) -> None:
        """Start the keeper, a process that starts and ends the server; wait for neither of them.

        Args:
            plan: how to run the server.
            log: the file that its output is appended to.
            argv: for tests, another program instead of the server, called with the socket's path.

        Raises OSError if the keeper cannot be started.
        """
        self.plan = plan
        self.log = log
        self.key = secrets.token_urlsafe(32)
        # The name is short, because a socket's path has at most 107 bytes. mkdtemp makes the folder
        # private.
        self.folder = Path(tempfile.mkdtemp(prefix="honesmith-"))
        self.address = self.folder / "socket"
        self.began = time.monotonic()
        self.ready_s = 0.0  # seconds from start to the first health check that was answered
        server_command = [*argv, str(self.address)] if argv else command(plan, self.address)
        # The keeper reads one end of this pipe, and this process holds the other, `self._lifeline`.
        # When that closes, the keeper ends the server.
        keeper_end, self._lifeline = os.pipe()
        try:
            self._keeper = self._start_keeper(keeper_end, server_command)
        except OSError:
            os.close(self._lifeline)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(keeper_end)  # the keeper has a copy

    def _start_keeper(
        self, lifeline: int, server_command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        """Start the keeper, which runs `server_command` until that ends or the pipe is closed.

        `lifeline` is the descriptor of the pipe's reading end; this process holds the other end.
        Raises OSError if the keeper cannot be started.
        """
        with open(self.log, "ab") as output:
            return subprocess.Popen(
                [*KEEPER, str(lifeline), str(self.folder), *server_command],
                cwd=self.folder,
                # `_with_our_path` lets the keeper import this package. The keeper starts the server
                # without that variable.
                env=_with_our_path(variables(self.plan, self.key, os.environ)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(lifeline,),
            )

    @property
    def is_alive(self) -> bool:
        """Whether the keeper, and so the server, still runs."""
        return self._keeper.poll() is None

    def wait_ready(
        self, patience_s: float = START_S, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the server answers, up to `patience_s` seconds after its start.

        `on_wait` is called after each health check that fails; an error that it raises ends the
        waiting. Raises ServerDied if the server ends, or if it is not ready in time (it is then
        stopped).
        """
        if self.ready_s:  # an earlier call has waited
            return
        while not self.healthy():
            on_wait()
            if not self.is_alive:
                raise ServerDied(f"vLLM ended before it was ready: {self.last_words()}")
            if time.monotonic() - self.began > patience_s:
                self.stop()
                raise ServerDied(
                    f"vLLM was not ready after {patience_s:.0f} s: {self.last_words()}"
                )
            time.sleep(POLL_S)
        self.ready_s = time.monotonic() - self.began

    def healthy(self) -> bool:
        """Return whether the server answers its health check within 5 seconds."""
        connection = _UnixConnection(self.address, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def last_words(self) -> str:
        """Return the line of the log that says most about why the server ended."""
        return last_words(self.log)

    def stop(self) -> None:
        """End the server and every process it started; returns when they are gone."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            # The keeper waits up to STOP_S three times: after SIGTERM, after SIGKILL, and for
            # processes that left the server's group.
            self._keeper.wait(STOP_S + 10)
        except subprocess.TimeoutExpired:  # the keeper hangs; killing it kills its server too
            self._keeper.kill()
            self._keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def last_words(log: Path) -> str:
    """Return the last line of a log that names an error, or else its last line that is not
    empty."""
    lines = [line.strip() for line in read_tail(log, 20_000).splitlines() if line.strip()]
    if not lines:
        return f"nothing is in {log}"
    # "rror: " matches "Error: ", "error: " and names such as "ValueError: ".
    error_lines = [line for line in lines if "rror: " in line and not _HARMLESS_LEVEL.search(line)]
    telling_line = (error_lines or lines)[-1]
    return _LOG_PREFIX.sub("", telling_line)[:300]


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a socket file."""

    def __init__(self, path: Path, timeout: float) -> None:
        """Prepare a connection to the socket file `path`; `timeout` is in seconds."""
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the socket file instead of a host and port."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _with_our_path(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` with PYTHONPATH set, because the keeper imports this very module."""
    return environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}


def run_keeper(lifeline: int, folder: Path, argv: Sequence[str]) -> int:
    """Run the server until it ends or the lifeline closes, then end all its processes. This is the
    keeper's work.

    Args:
        lifeline: file descriptor of a pipe whose other end the client holds.
        folder: the private folder, removed at the end.
        argv: the command of the server.

    Returns the server's exit status; 0 if the lifeline closed first, 1 if the server could not be
    started.
    """
    kernel.become_subreaper()  # processes that leave the group become children of this one
    # Signals must not end the keeper, because it always has to clean up; the pipe ends it.
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, lambda *_: None)
    child_signal = _open_child_signal()
    status = 1  # the result if the server cannot be started
    try:
        child = _start_server(argv)
        _wait_for_end(child, lifeline, child_signal)
        status = child.poll() or 0  # None: the server still runs
        _end(child)
    except OSError as error:
        sys.stderr.write(f"vLLM could not be started: {error}\n")
    finally:
        _end_adopted()
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _open_child_signal() -> int:
    """Return a descriptor that becomes readable when a child of this process ends, for `select`."""
    child_signal, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    # When a child ends, this process gets a signal. A signal with a handler, even one that does
    # nothing, writes a byte to `wakeup`.
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return child_signal


def _start_server(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the server in a process group of its own; it dies with this process.

    Raises OSError if it cannot be started.
    """
    return subprocess.Popen(
        list(argv),
        # PYTHONPATH was set for this process only (`_with_our_path`).
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        process_group=0,
        # The kernel ends the child with the thread that forked it; the keeper has only one.
        preexec_fn=kernel.die_with_parent if kernel.LINUX else None,
    )


def _wait_for_end(child: subprocess.Popen[bytes], lifeline: int, child_signal: int) -> None:
    """Wait until the server has ended, or the other end of the lifeline is closed.

    Args:
        child: the server.
        lifeline: descriptor of a pipe whose other end the client holds.
        child_signal: descriptor that becomes readable when a child has ended.
    """
    while child.poll() is None:
        readable, _, _ = select.select([lifeline, child_signal], [], [])
        if child_signal in readable:
            os.read(child_signal, 4096)  # empty it, so that the next `select` waits again
        if lifeline in readable and not os.read(lifeline, 1):  # the other end is closed
            break


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process group of the server.

    The group gets SIGTERM, so that the server can remove its shared memory, and then SIGKILL. After
    each signal this waits up to STOP_S seconds for the server; one that survives both is left
    alone.
    """
    if child.poll() is None:
        _signal_group_and_wait(child, signal.SIGTERM)
    # Even if the server itself has ended, others of its group may live.
    _signal_group_and_wait(child, signal.SIGKILL)


def _signal_group_and_wait(child: subprocess.Popen[bytes], signal_number: int) -> None:
    """Send a signal to the process group of `child`; wait up to STOP_S seconds for `child` to
    end."""
    # ProcessLookupError: the group is gone; PermissionError: its processes belong to others.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal_number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)


def _end_adopted() -> None:
    """Kill processes that left the server's group; they have become children of this process."""
    own_pid = os.getpid()
    children_file = Path(f"/proc/{own_pid}/task/{own_pid}/children")
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):  # some kernels have no such file
            for child in children_file.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        try:
            ended_pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # no child is left
            return
        if ended_pid == 0:  # all remaining children still run
            time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(run_keeper(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
