"""A vLLM server as a child: started from vLLM's own environment, gone when we are.

The server listens on a socket file in a private folder instead of a port: some of its routes run
code for whoever reaches them and its key guards only a part of the rest, so nobody but this user
shall reach any. Between us and it stands a keeper (`python -P -m engine.processes.vllm_process`),
which reads
a pipe whose other end is here: when that closes, however this process ended, the keeper kills every
process of the server and removes the folder.

Neither torch nor vLLM is imported here; the standard library alone.
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

BASE = "base"  # the model name that stands for no adapter
# The ranks vLLM takes as an upper bound; an adapter of any rank fits under the next one.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
KEEPER = (sys.executable, "-P", "-m", "engine.processes.vllm_process")
START_S = 600.0  # importing vLLM takes 30 s on two idle cores and minutes on busy ones
STOP_S = 5.0
POLL_S = 0.1
_STAMP = re.compile(r"^(\([^)]*\) )?[A-Z]+ [^\]]*\] ")  # "(Worker pid=7) ERROR 01-01 [core.py:3] "
_ASIDE = re.compile(r"(^|\) )(DEBUG|INFO|WARNING) ")
# What a server needs of our variables. Secrets of environments are not among them.
_KEPT = (
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
    """The server ended, or did not become ready in time; the message has its last words."""


@dataclass(frozen=True)
class Plan:
    """How a server is to be run.

    Attributes:
        python: an interpreter whose environment has vLLM.
        model: the base model's folder.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16", of weights and arithmetic.
        max_length: tokens of prompt and completion together.
        rows: completions under way at once.
        lora_rank: the largest rank of an adapter; 0 for none.
        adapters: how many answer at once.
        sleeps: whether its memory can be handed back between uses (CUDA only).
        memory: bytes for the key-value cache on a CPU; the share of a GPU in 0..1.
        threads: of a CPU server.
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


def rank_limit(rank: int) -> int:
    """The smallest bound of vLLM's that an adapter of `rank` fits under.

    Raises ValueError above 512, which no bound covers.
    """
    for limit in RANKS:
        if rank <= limit:
            return limit
    raise ValueError(f"vLLM takes adapters up to rank {RANKS[-1]}, not {rank}")


def command(plan: Plan, address: Path) -> list[str]:
    """The server's command line. `address`: the socket file it shall listen on."""
    argv = [str(plan.python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(plan.model), "--served-model-name", BASE]
    argv += ["--uds", str(address), "--disable-uvicorn-access-log"]
    argv += ["--dtype", plan.dtype, "--max-model-len", str(plan.max_length)]
    argv += ["--max-num-seqs", str(plan.rows)]
    # Ids in, ids out; log-probabilities of what was sampled from, temperature included; the
    # model's own sampling defaults stay out of it.
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    argv += ["--generation-config", "vllm", "--enable-prefix-caching"]
    if plan.lora_rank:
        argv += ["--enable-lora", "--max-lora-rank", str(rank_limit(plan.lora_rank))]
        # One more can be held than answers: the new version is loaded before the old one goes.
        argv += ["--max-loras", str(plan.adapters), "--max-cpu-loras", str(plan.adapters + 1)]
    if plan.device == "cpu":
        # A seeded request whose prompt is read in parts ends the engine on a CPU ("CPU Generator
        # does not use offset"), so prompts are read whole; and there is nothing to compile for.
        most = max(plan.max_length, 4096)
        argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(most)]
        argv += ["--enforce-eager"]
    else:
        argv += ["--gpu-memory-utilization", f"{plan.memory:.3f}"]
        if plan.sleeps:
            argv += ["--enable-sleep-mode"]
    return argv


def variables(plan: Plan, key: str, given: Mapping[str, str]) -> dict[str, str]:
    """The server's environment variables, from those of this process."""
    kept = {name: given[name] for name in _KEPT if name in given}
    kept |= {name: value for name, value in given.items() if name.startswith(("NVIDIA_", "NCCL_"))}
    kept |= {
        "VLLM_API_KEY": key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing may be fetched
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if plan.sleeps:
        kept["VLLM_SERVER_DEV_MODE"] = "1"  # /sleep and /wake_up, on a socket only we can open
    if plan.device == "cpu":
        kept |= {
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(plan.memory / 2**30))),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(plan.threads),
            "GOMP_SPINCOUNT": "10000",
        }
    return kept


class VllmProcess:
    """A server that was started; `wait_ready` before it is asked anything.

    Args:
        plan: how to run it.
        log: the file its output is appended to.
        argv: another program in the server's place, given the socket's path; tests only.
    """

    def __init__(self, plan: Plan, log: Path, argv: Sequence[str] = ()) -> None:
        self.plan = plan
        self.log = log
        self.key = secrets.token_urlsafe(32)
        # Short on purpose: a socket's path has at most 107 bytes. mkdtemp makes it private.
        self.folder = Path(tempfile.mkdtemp(prefix="honesmith-"))
        self.address = self.folder / "socket"
        self.began = time.monotonic()
        self.ready_s = 0.0  # seconds from start to the first health check that was answered
        chosen = [*argv, str(self.address)] if argv else command(plan, self.address)
        lifeline, self._lifeline = os.pipe()
        try:
            with open(log, "ab") as output:
                self._keeper = subprocess.Popen(
                    [*KEEPER, str(lifeline), str(self.folder), *chosen],
                    cwd=self.folder,
                    env=_importing_us(variables(plan, self.key, os.environ)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(lifeline,),
                )
        except OSError:
            os.close(self._lifeline)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(lifeline)

    @property
    def is_alive(self) -> bool:
        return self._keeper.poll() is None

    def wait_ready(
        self, patience_s: float = START_S, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Until the server answers. `on_wait` is called between looks and may raise.

        Raises ServerDied when it ends before, or is not ready in time (it is stopped then).
        """
        if self.ready_s:
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
        """Whether the server answers its health check."""
        connection = _UnixConnection(self.address, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def last_words(self) -> str:
        """The line of the log that says most about why the server ended."""
        return last_words(self.log)

    def stop(self) -> None:
        """End the server and everything it started; returns when that is done."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            self._keeper.wait(STOP_S + 10)
        except subprocess.TimeoutExpired:  # a keeper that hangs: its server dies with it
            self._keeper.kill()
            self._keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def last_words(log: Path) -> str:
    """The last line that names an error, else the last one that is not empty."""
    lines = [line.strip() for line in read_tail(log, 20_000).splitlines() if line.strip()]
    named = [line for line in lines if "rror: " in line and not _ASIDE.search(line)]
    for line in reversed(named or lines):
        return _STAMP.sub("", line)[:300]
    return f"nothing is in {log}"


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _importing_us(kept: dict[str, str]) -> dict[str, str]:
    """The keeper runs this module; in a checkout that is not installed it must find it too."""
    return kept | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def keep(lifeline: int, folder: Path, argv: Sequence[str]) -> int:
    """The keeper: run `argv` until it ends or the pipe closes, then leave nothing of it."""
    kernel.become_subreaper()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status = 1
    try:
        child = subprocess.Popen(
            list(argv),
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            process_group=0,
            # Bound to the thread that forks: the keeper has one.
            preexec_fn=kernel.die_with_parent if kernel.LINUX else None,
        )
        while child.poll() is None:
            readable = select.select([lifeline, ended], [], [])[0]
            if ended in readable:
                os.read(ended, 4096)
            if lifeline in readable and not os.read(lifeline, 1):
                break
        status = child.poll() or 0
        _end(child)
    except OSError as error:
        sys.stderr.write(f"vLLM could not be started: {error}\n")
    finally:
        _end_adopted()
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server's group, so that it may tidy shared memory away, then SIGKILL."""
    for number, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        if child.poll() is not None and number == signal.SIGTERM:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)


def _end_adopted() -> None:
    """Kill what left the group; as its reaper this process has become its parent."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            pid = os.getpid()
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
