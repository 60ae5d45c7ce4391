"""Rank 0's side: it starts the other ranks, tells them what to do, and sees one of them die.

Each of the others is a child process with a socket to this one alone. Whoever dies closes it: a
rank ends as soon as rank 0 is gone, and rank 0 fails as soon as one of the others is. Where it
cannot notice, because it waits in a call of the driver for that very rank, a timer ends it.
"""

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, NamedTuple, TypeVar

import torch

from engine.core.hints import Hint
from engine.processes import programs
from engine.processes.outcome import Failure
from engine.processes.trainer_variables import visible_devices
from engine.records.run_config import DistillConfig, DPOConfig, GRPOConfig, RunConfig, SFTConfig
from engine.worker.core import pulse
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job
from engine.worker.network.adapter import Adapter
from engine.worker.ranks import collective
from engine.worker.ranks.messages import (
    Beat,
    End,
    Failed,
    Fingerprint,
    Join,
    TakeState,
)
from engine.worker.update.optimizer import AdamW

RANK, RANKS, RANK_FD = "HONESMITH_RANK", "HONESMITH_RANKS", "HONESMITH_RANK_FD"
FAILED = 3  # exit status of a trainer that has written why it failed
LEAVE_S = 10.0  # that a rank may take to end by itself
STUCK_S = 15.0  # that rank 0 may take to notice that another is gone
_HINT = "Read the end of the console log; resume continues from the last checkpoint."

Message = TypeVar("Message")


class RankDevice(NamedTuple):
    """The device of a rank: its id, and the CUDA_VISIBLE_DEVICES that shows it alone."""

    id: str
    visible: str


def devices_of(job: Job[RunConfig]) -> list[RankDevice]:
    """The device of each rank of a run, rank 0's first; one for a run in one process.

    A run on GPUs has a rank on each that it was leased. On a CPU its setting `gpus` counts them.
    """
    ids = os.environ.get("HONESMITH_DEVICE", "").split(",")
    config = job.config
    is_shared = isinstance(config, SFTConfig | DPOConfig | GRPOConfig | DistillConfig)
    if own_rank() or not is_shared:
        ids = [job.device]
    elif job.device == "cpu":
        ids = ["cpu"] * config.settings.gpus
    return [RankDevice(id_, visible_devices(id_)) for id_ in ids] if len(ids) > 1 else []


class _Helper:
    """One of the other ranks, as rank 0 sees it.

    Attributes:
        messages: what it said and nobody has read yet; None comes last, when its socket is closed.
        failed: why it cannot go on, if it said so.
        gone: set when its socket is closed.
    """

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", socket: Connection) -> None:
        self.rank = rank
        self.process = process
        self.socket = socket
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failed: Failed | None = None
        self.gone = threading.Event()

    def failure(self) -> WorkerFailure:
        """The failure of the run, of which this rank is gone or about to be."""
        self.gone.wait(LEAVE_S)  # by then its last words are read
        failed = self.failed
        if failed is not None:
            message = f"Rank {self.rank}: {failed.message}"
            evidence = failed.evidence
            return WorkerFailure(failed.kind, message, evidence=evidence, hint=failed.hint)
        return WorkerFailure(
            "killed",
            f"Rank {self.rank} is gone: {self._end_in_words()}.",
            evidence=f"rank {self.rank}, process {self.process.pid}",
            hint=Hint(_HINT),
        )

    def _end_in_words(self) -> str:
        """How its process ended, such as "it was ended by signal 9"."""
        try:
            status = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"it was ended by signal {-status}" if status < 0 else f"its exit status is {status}"


class Ranks:
    """The ranks of a run, this process among them.

    Attributes:
        count: how many they are, this one included.
    """

    def __init__(self, job: Job[RunConfig], devices: Sequence[RankDevice]) -> None:
        """Start a process for each rank but this one.

        Args:
            devices: the device of every rank, this one's first.
        """
        self.count = len(devices)
        self._job = job
        self._known: tuple[Adapter, int] | None = None  # adapter and version the others have
        self._is_joined = self._is_closed = False
        self._timers: list[threading.Timer] = []
        self._folder = job.run.ranks
        shutil.rmtree(self._folder, ignore_errors=True)  # of an attempt that was killed
        self._folder.mkdir(mode=0o700)
        names = ", ".join(device.id for device in devices)
        job.event("ranks", f"{self.count} ranks, on {names}", ranks=self.count)
        self._helpers = {rank: self._start(rank, devices[rank]) for rank in range(1, self.count)}

    # --- processes --------------------------------------------------------------------------------

    def _start(self, rank: int, device: RankDevice) -> _Helper:
        """Start the process of a rank, and the threads that read what it says and prints."""
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", *programs.command("rank"), str(self._job.run.path)],
                cwd=self._job.run.path,
                env=self._variables(rank, device, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        helper = _Helper(rank, process, ours)
        assert process.stdout is not None
        for work in ((self._listen, helper), (_copy_marked, process.stdout, rank)):
            threading.Thread(target=work[0], args=work[1:], daemon=True).start()
        return helper

    def _variables(self, rank: int, device: RankDevice, socket: int) -> dict[str, str]:
        """The environment variables of a rank."""
        variables = {
            **os.environ,
            "HONESMITH_DEVICE": device.id,
            "CUDA_VISIBLE_DEVICES": device.visible,
            RANK: str(rank),
            RANKS: str(self.count),
            RANK_FD: str(socket),
        }
        variables.pop("HONESMITH_LIFELINE_FD", None)  # it has its own way to learn of our end
        return variables

    def _listen(self, helper: _Helper) -> None:
        """Read what a rank says until it is gone; runs in a thread."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = helper.socket.recv()
                if isinstance(message, Failed):
                    helper.failed = message
                else:
                    helper.messages.put(message)
        helper.gone.set()
        helper.messages.put(None)
        if not self._is_closed:
            timer = threading.Timer(STUCK_S, self._end_stuck, args=(helper,))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    def _end_stuck(self, helper: _Helper) -> None:
        """End this process, which did not notice that a rank is gone: it waits for it where nothing
        interrupts it. Its failure is written first."""
        if self._is_closed:
            return
        why = helper.failure()
        failure = Failure(why.kind, why.message, why.evidence, why.advice)
        with contextlib.suppress(OSError):  # a full disk
            self._job.fail(failure)
            self._job.event("failed", failure.message, kind=failure.kind)
        os._exit(FAILED)

    def close(self) -> None:
        """End the other ranks; returns when they are gone."""
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        for helper in self._helpers.values():
            with contextlib.suppress(OSError):
                helper.socket.send(End())
        collective.leave(broken=any(helper.gone.is_set() for helper in self._helpers.values()))
        for helper in self._helpers.values():
            try:
                helper.process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                helper.process.kill()
                helper.process.wait()
            helper.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- orders and answers -----------------------------------------------------------------------

    def tell(self, rank: int, order: Any) -> None:
        """Send an order to a rank. Raises WorkerFailure where it is gone."""
        helper = self._helpers[rank]
        try:
            helper.socket.send(order)
        except OSError:
            raise helper.failure() from None

    def answer(self, rank: int) -> Any:
        """The next answer of a rank, which is waited for. Raises WorkerFailure where the rank
        cannot go on or is gone."""
        helper = self._helpers[rank]
        while True:
            message = helper.messages.get()
            pulse.beat()
            if message is None:
                raise helper.failure()
            if not isinstance(message, Beat):
                return message

    def come_so_far(self, rank: int, kind: type[Message]) -> list[Message]:
        """The answers of a kind that a rank has given so far, without waiting for any; others
        are left for `answer`."""
        helper = self._helpers[rank]
        taken: list[Message] = []
        others: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = helper.messages.get_nowait()
                if isinstance(message, kind):
                    taken.append(message)
                elif not isinstance(message, Beat):
                    others.append(message)
        for message in others:  # a `Done` comes after all of the kind
            helper.messages.put(message)
        return taken

    def carry_out(self, order: Any, beside: Callable[[], None] | None = None) -> list[Any]:
        """Have every other rank carry out an order; returns their results, rank by rank. `beside`
        is called meanwhile: this rank's side of a collective call."""
        if beside is not None:
            self._join()
        for rank in self._helpers:
            self.tell(rank, order)
        if beside is not None:
            self._together(beside)
        return [self.answer(rank).result for rank in self._helpers]

    def _join(self) -> None:
        """Connect all ranks for collective calls, where that was not done before."""
        if self._is_joined:
            return
        store = str(self._folder / "store")
        device = torch.device("cuda" if self._job.device.startswith("cuda") else "cpu")
        for rank in self._helpers:
            self.tell(rank, Join(store))
        for rank in self._helpers:  # loaded, and about to connect
            self.answer(rank)
        self._together(lambda: collective.join(store, 0, self.count, device))
        self._is_joined = True

    def _together(self, call: Callable[[], None]) -> None:
        """Do this rank's side of a collective call. Raises WorkerFailure where another rank is
        gone, whatever the call itself raises then."""
        try:
            call()
        except RuntimeError as error:
            for helper in self._helpers.values():
                # A rank that is gone closes its socket at once.
                if helper.gone.wait(1):
                    raise helper.failure() from error
            raise

    # --- weights ----------------------------------------------------------------------------------

    def have(self, adapter: Adapter) -> bool:
        """Whether the policy of the other ranks has the weights that `adapter` has now."""
        return self._known is not None and self._known == (adapter, adapter.version)

    def hand_on_state(self, adapter: Adapter, optimizer: AdamW) -> None:
        """Give the policy and the optimizer of all ranks the state of this rank's."""
        has_moments = [parameter in optimizer.state for parameter in adapter.parameters()]
        self.carry_out(
            TakeState(has_moments),
            beside=lambda: collective.hand_on_state(adapter, optimizer, has_moments),
        )
        self._known = (adapter, adapter.version)

    def step(self, order: Any, adapter: Adapter, apply: Callable[[], float]) -> float:
        """Do an optimizer step on every rank: the gradients are added up, then each applies the
        same step. Returns the gradient's norm, which `apply` returns here."""
        for rank in self._helpers:
            self.tell(rank, order)
        self._together(lambda: collective.sum_gradients(adapter.parameters()))
        norm = apply()
        for rank in self._helpers:
            self.answer(rank)
        self._known = (adapter, adapter.version)
        return norm

    def require_same_weights(self, fingerprint: bytes) -> None:
        """Check that all ranks have the weights with this fingerprint. Raises WorkerFailure (kind
        internal) where one has others: its updates would count for a model that is not saved."""
        for rank, other in enumerate(self.carry_out(Fingerprint()), start=1):
            if other != fingerprint:
                raise WorkerFailure(
                    "internal",
                    f"Rank {rank} has other weights than rank 0.",
                    evidence=f"SHA-256 {other.hex()[:16]} and {fingerprint.hex()[:16]}",
                )


def _copy_marked(lines: IO[bytes], rank: int) -> None:
    """Copy what a rank prints to the console of the run, each line with the rank's number; runs in
    a thread."""
    for line in lines:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(f"[rank {rank}] ".encode() + line)
            sys.stderr.buffer.flush()


def own_rank() -> int:
    """The number of this process among the ranks of its run; 0 for the trainer."""
    return int(os.environ.get(RANK) or 0)


def rank_count() -> int:
    """How many ranks the run has, as one of them was told; 1 for the trainer."""
    return int(os.environ.get(RANKS) or 1)
