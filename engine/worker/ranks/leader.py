"""Rank 0's view of the other ranks (processes of a run): it starts them, tells them what to do, and
notices if one dies.

Each of the others is a child process with a socket to rank 0 alone. The socket closes if either
process dies: a rank ends as soon as rank 0 is gone, and rank 0 fails as soon as another rank is
gone. If rank 0 cannot notice, because it waits for that very rank in a call of the driver, a timer
ends rank 0.
"""

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, NamedTuple, TypeVar

import torch

from engine.core.hints import Hint
from engine.machine.processes import programs
from engine.machine.processes.outcome import Failure
from engine.machine.processes.trainer_variables import visible_devices
from engine.models.sizing.ranks import training_devices
from engine.records.run_config import GRPOConfig, RunConfig, TrainConfig
from engine.worker.core import pulse
from engine.worker.core.failures import WorkerFailure, out_of_memory
from engine.worker.core.job import Job
from engine.worker.network.adapter import Adapter
from engine.worker.ranks import collective
from engine.worker.ranks.lockstep import EmptyPasses, Lockstep
from engine.worker.ranks.messages import (
    Accompany,
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
LEAVE_S = 10.0  # a rank that has not ended by itself after so many seconds is killed
STUCK_S = 15.0  # rank 0 is ended if it has not noticed the end of a rank after so many seconds
CAUSE_S = 2.0  # how long rank 0 waits to learn which rank ended first, and so is the cause
_HINT = "Read the end of the console log; resume continues from the last checkpoint."

Message = TypeVar("Message")


class RankDevice(NamedTuple):
    """The device of a rank: its id, and the value of CUDA_VISIBLE_DEVICES that shows only this
    device."""

    id: str
    visible: str


def training_ranks(config: RunConfig, ranks: int) -> int:
    """Return how many of a run's `ranks` processes (one per device) train; these are the first
    ones. With `async_sampling` the others sample beside them."""
    samples_beside = isinstance(config, GRPOConfig) and config.settings.async_sampling
    return training_devices(ranks, beside=samples_beside)


def is_sharded(config: RunConfig, ranks: int) -> bool:
    """Tell whether the layers of the base are cut over those processes (ranks) of the run that
    train. `ranks` is how many processes the run has."""
    is_wanted = isinstance(config, TrainConfig) and config.settings.shard_base
    return is_wanted and training_ranks(config, ranks) > 1


def devices_of(job: Job[RunConfig]) -> list[RankDevice]:
    """List the device of each rank (process) of a run, rank 0's first. Returns [] if the run has
    only one process, and on any rank but 0.

    On GPUs, a run has one rank on each GPU that it was leased. On a CPU, the setting `gpus` is the
    number of ranks.
    """
    ids = os.environ.get("HONESMITH_DEVICE", "").split(",")
    config = job.config
    if own_rank() or not isinstance(config, TrainConfig):
        ids = [job.device]
    elif job.device == "cpu":
        ids = ["cpu"] * config.settings.gpus
    if len(ids) == 1:  # one process needs no ranks
        return []
    return [RankDevice(device_id, visible_devices(device_id)) for device_id in ids]


class _Helper:
    """One of the other ranks, as rank 0 sees it.

    Attributes:
        messages: messages that it sent and nobody has read yet. None comes last, when its socket is
            closed.
        failed: why it cannot go on, if it said so.
        gone: set when its socket is closed.
    """

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]", socket: Connection) -> None:
        """Represent the rank with this number, whose process has just been started. `socket` is
        our end of the pair of sockets to it."""
        self.rank = rank
        self.process = process
        self.socket = socket
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failed: Failed | None = None
        self.gone = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process is gone, or has said that it cannot go on."""
        return self.failed is not None or self.gone.is_set()

    @property
    def is_cause(self) -> bool:
        """Whether the rank ended by itself, and not because another rank ended."""
        return self.has_ended and not (self.failed is not None and self.failed.is_consequence)

    def failure(self) -> WorkerFailure:
        """Make the failure of the run that the end of this rank causes: what the rank reported
        itself, or, if it reported nothing, that its process is gone."""
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

    def wait_until_gone(self) -> None:
        """Wait until the rank's process has ended, and close its socket. The process is killed if
        it has not ended after `LEAVE_S` seconds."""
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()

    def _end_in_words(self) -> str:
        """Say how the rank's process ended, such as "it was ended by signal 9" or "its exit status
        is 1". Waits at most a second for its end."""
        try:
            status = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"it was ended by signal {-status}" if status < 0 else f"its exit status is {status}"


class Ranks:
    """The ranks of a run, as rank 0 (this process) sees them.

    Attributes:
        count: how many ranks train, this one included.
        trainers: the numbers of the other ranks that train.
        samplers: the numbers of the other ranks that sample: the same as `trainers`, or ranks that
            only sample.
    """

    def __init__(self, job: Job[RunConfig], devices: Sequence[RankDevice], training: int) -> None:
        """Start a process for each rank that trains, except this one, which is rank 0.

        Args:
            devices: the device of every rank, this one's first.
            training: how many ranks train; these are the first ones. On the other devices
                `start_samplers` starts ranks that only sample.
        """
        self.count = training
        self.trainers = self.samplers = range(1, training)
        self._devices = devices
        self._job = job
        # The adapter, and its version, that the other ranks' policies have.
        self._delivered: tuple[Adapter, int] | None = None
        self._is_joined = self._is_closed = self._is_accompanied = False
        self.lockstep: Lockstep | None = None
        self._timers: list[threading.Timer] = []
        self._rank_ended = threading.Condition()  # notified when a rank has ended
        self._folder = job.run.ranks
        shutil.rmtree(self._folder, ignore_errors=True)  # an attempt that was killed has left it
        self._folder.mkdir(mode=0o700)
        names = ", ".join(device.id for device in devices[:training])
        job.event("ranks", f"training on {names}", ranks=training)
        self._helpers = {rank: self._start(rank, devices[rank]) for rank in self.trainers}

    def start_samplers(self) -> None:
        """Start a process on each device that does not train. These ranks only sample."""
        self.samplers = range(self.count, len(self._devices))
        names = ", ".join(self.sampling_devices)
        self._job.event("ranks", f"sampling beside on {names}", ranks=len(self._devices))
        self._helpers |= {rank: self._start(rank, self._devices[rank]) for rank in self.samplers}

    @property
    def devices(self) -> int:
        """How many devices the run has."""
        return len(self._devices)

    @property
    def sampling_devices(self) -> list[str]:
        """The ids of the devices whose ranks only sample."""
        return [device.id for device in self._devices[self.count :]]

    @property
    def samples_beside(self) -> bool:
        """Whether some ranks only sample; rank 0 then does not sample."""
        return self.samplers != self.trainers

    # --- processes --------------------------------------------------------------------------------

    def _start(self, rank: int, device: RankDevice) -> _Helper:
        """Start the process of a rank on a device, and two threads of this process: one reads its
        messages, one copies what it prints. Returns its representation here."""
        ours, theirs = Pipe()
        with theirs:  # closed here at the end; the process then has the only copy of its end
            process = subprocess.Popen(
                [sys.executable, "-P", *programs.command("rank"), str(self._job.run.path)],
                cwd=self._job.run.path,
                env=self._environment_variables(rank, device, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        helper = _Helper(rank, process, ours)
        assert process.stdout is not None
        reader = threading.Thread(target=self._listen, args=(helper,), daemon=True)
        reader.start()
        copier = threading.Thread(target=_copy_with_rank, args=(process.stdout, rank), daemon=True)
        copier.start()
        return helper

    def _environment_variables(self, rank: int, device: RankDevice, socket: int) -> dict[str, str]:
        """Return the environment variables for the process of a rank on `device`. `socket` is the
        file descriptor by which it talks to this process."""
        variables = {
            **os.environ,
            "HONESMITH_DEVICE": device.id,
            "CUDA_VISIBLE_DEVICES": device.visible,
            RANK: str(rank),
            RANKS: str(len(self._devices)),
            RANK_FD: str(socket),
        }
        # A rank notices the end of this process by its socket, so it needs no lifeline.
        variables.pop("HONESMITH_LIFELINE_FD", None)
        return variables

    def _listen(self, helper: _Helper) -> None:
        """Read the messages of another rank, a process of this run on another device, until that
        process is gone. Runs in a thread of its own for each rank.

        Whoever waits for the rank is woken up when it reports that it failed, and once more when it
        is gone: a rank may go without a report, or report and live on for a while.
        """
        with contextlib.suppress(EOFError, OSError):  # raised by `recv` when the process is gone
            while True:
                message = helper.socket.recv()
                if isinstance(message, Failed):
                    helper.failed = message
                    self._wake_waiting(helper)
                else:
                    helper.messages.put(message)
        helper.gone.set()
        self._wake_waiting(helper)

    def _wake_waiting(self, helper: _Helper) -> None:
        """Wake up every caller that waits for a rank (`helper`) which has ended or is about to.
        Also start a timer that ends this process if it waits where it cannot be woken up."""
        with self._rank_ended:
            self._rank_ended.notify_all()
        helper.messages.put(None)  # wakes up `answer`
        if not self._is_closed:
            timer = threading.Timer(STUCK_S, self._end_stuck, args=(helper,))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    def _end_stuck(self, helper: _Helper) -> None:
        """End this process if it has not noticed that a rank (`helper`) is gone, because it waits
        for that rank in a call that nothing interrupts. The failure is written first. Called by a
        timer."""
        if self._is_closed:
            return
        why = self._failure(f"rank {helper.rank} is gone")
        failure = Failure(why.kind, why.message, why.evidence, why.advice)
        with contextlib.suppress(OSError):  # a full disk
            self._job.fail(failure)
            self._job.event("failed", failure.message, kind=failure.kind)
        os._exit(FAILED)

    def close(self, *, failed: bool = False) -> None:
        """End the other ranks, and return when they are gone. `failed` says that the run has
        failed. With a sharded base the ranks are then killed, because they may wait for this one in
        the middle of a pass, where no order reaches them."""
        self._is_closed = True  # from now on the end of a rank is expected
        for timer in self._timers:
            timer.cancel()
        for helper in self._helpers.values():
            if failed and self.lockstep is not None:
                helper.process.kill()
        if not failed:  # after a failure the ranks may be anywhere in a pass
            self._end_empty_passes()
        for helper in self._helpers.values():
            with contextlib.suppress(OSError):  # the rank is gone already
                helper.socket.send(End())
        collective.leave(broken=any(helper.gone.is_set() for helper in self._helpers.values()))
        for helper in self._helpers.values():
            helper.wait_until_gone()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- orders and answers -----------------------------------------------------------------------

    def tell(self, rank: int, order: Any) -> None:
        """Send an order (a message of messages.py) to the process of rank `rank`. Raises
        WorkerFailure if that is gone."""
        self._end_empty_passes()  # during these the ranks read no orders
        helper = self._helpers[rank]
        try:
            helper.socket.send(order)
        except OSError as error:
            raise self._failure(f"rank {rank}: {error}") from error

    def answer(self, rank: int) -> Any:
        """Wait for the next answer of a rank and return it; signs of life are skipped. Raises
        WorkerFailure if the rank is gone or cannot go on."""
        self._end_empty_passes()
        helper = self._helpers[rank]
        while True:
            message = helper.messages.get()
            pulse.beat()
            if message is None:
                raise self._failure(f"rank {rank} has ended")
            if not isinstance(message, Beat):
                return message

    def answers_so_far(self, rank: int, kind: type[Message]) -> list[Message]:
        """Return the answers of type `kind` that a rank has sent so far, without waiting. Answers
        of other types stay queued for `answer`; signs of life are dropped."""
        helper = self._helpers[rank]
        answers: list[Message] = []
        other_messages: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = helper.messages.get_nowait()
                if isinstance(message, kind):
                    answers.append(message)
                elif not isinstance(message, Beat):
                    other_messages.append(message)
        # Put back in their order. What arrived meanwhile stands before them, which does no harm: a
        # rank ends its work with `Done`, so nothing but answers of `kind` can arrive before that.
        for message in other_messages:
            helper.messages.put(message)
        return answers

    def carry_out(
        self, order: Any, ranks: Iterable[int], collective_call: Callable[[], None] | None = None
    ) -> list[Any]:
        """Send an order to other ranks, wait until they have carried it out, and return their
        results, rank by rank.

        If the order makes them take part in a call that all ranks must make at the same time, such
        as a broadcast, `collective_call` is this rank's side of it.
        """
        ranks = list(ranks)
        if collective_call is not None:
            self._join()
        for rank in ranks:
            self.tell(rank, order)
        if collective_call is not None:
            self._run_together(collective_call)
        return [self.answer(rank).result for rank in ranks]

    def _join(self) -> None:
        """Connect all ranks for collective calls, unless they are connected already."""
        if self._is_joined:
            return
        meeting = collective.Meeting(store_of(self._job), 1 + len(self._helpers), self.count)
        # Each rank answers when it has loaded its model, just before it connects.
        self.carry_out(Join(meeting), self._helpers)
        self._connect(meeting, collective.PATIENCE)

    def join_at_once(self) -> None:
        """Connect all ranks before they load their model, because a sharded base is loaded by all
        together. The other ranks connect without an order."""
        # All ranks there are train, because no others have been started yet.
        meeting = collective.Meeting(store_of(self._job), self.count, self.count)
        self._connect(meeting, collective.LOADING_PATIENCE)

    def _connect(self, meeting: collective.Meeting, patience: timedelta) -> None:
        """Connect this rank, which is number 0, with the others at `meeting`. Waits for them for at
        most `patience`; raises WorkerFailure if one does not come."""
        device = torch.device("cuda" if self._job.device.startswith("cuda") else "cpu")
        own_number = 0
        self._run_together(lambda: collective.join(meeting, own_number, device, patience))
        self._is_joined = True

    # --- a sharded base ---------------------------------------------------------------------------

    def start_lockstep(self, network: EmptyPasses) -> None:
        """Keep the passes of all ranks through `network` in step from now on. Its layers are
        sharded, so no rank can do a pass unless all others do one too (lockstep.py)."""
        group = collective.lockstep_group()
        self.lockstep = Lockstep(network, group, self._run_together, before=self.accompany)
        network.take_turn = self.lockstep.turn

    def accompany(self, busy: Collection[int] = ()) -> None:
        """If the base is sharded, tell the other ranks to do empty passes along with this rank's
        passes, until their next order. The ranks in `busy` do passes of their own and are not
        told."""
        if self.lockstep is None or self._is_accompanied:
            return
        for rank in self._helpers:
            if rank not in busy:
                self.tell(rank, Accompany())
        self._is_accompanied = True

    def _end_empty_passes(self) -> None:
        """End the empty passes of the other ranks, so that they listen to orders again."""
        if self.lockstep is not None and self._is_accompanied:
            self._is_accompanied = False
            self.lockstep.idle()

    def _run_together(self, call: Callable[[], None]) -> None:
        """Call `call`, this rank's side of a call that all ranks make at the same time. Raises
        WorkerFailure if another rank is gone or does not come."""
        try:
            with collective.errors_translated():
                call()
        except collective.Disconnected as error:
            raise self._failure(str(error)) from error

    def explain(self, error: RuntimeError) -> None:
        """Raise the WorkerFailure of a rank that has ended, if that explains `error`, which came
        from a call that waited for the rank. Returns if no rank has ended, or if memory ran out
        here."""
        helpers = self._helpers.values()
        with self._rank_ended:
            self._rank_ended.wait_for(lambda: any(helper.has_ended for helper in helpers), CAUSE_S)
        if not out_of_memory(error) and any(helper.has_ended for helper in helpers):
            raise self._failure(str(error)) from error

    def _failure(self, evidence: str) -> WorkerFailure:
        """Make the failure of the run. It is that of the rank that ended first, because the others
        end as a consequence. If no rank has ended by itself, it says which ranks did not come.
        `evidence` is what this process noticed."""
        helpers = self._helpers.values()
        with self._rank_ended:  # a rank that is gone closes its socket at once
            self._rank_ended.wait_for(lambda: any(helper.is_cause for helper in helpers), CAUSE_S)
        for helper in helpers:
            if helper.is_cause:
                return helper.failure()
        missing = [helper.rank for helper in helpers if not helper.has_ended]
        # All ended as a consequence of another rank's end, which can only be this one's.
        if not missing:
            return next(iter(helpers)).failure()
        ranks = " and ".join(f"rank {rank}" for rank in missing)
        return WorkerFailure(
            "stalled",
            f"{ranks.capitalize()} did not come to what all ranks do together.",
            evidence=evidence,
            hint=Hint(_HINT),
        )

    # --- weights ----------------------------------------------------------------------------------

    def have_weights_of(self, adapter: Adapter) -> bool:
        """Tell whether the other ranks that train have the weights in their copies of the adapter
        that `adapter` has in this process now.

        They have if the last weights they got, by `broadcast_state` or a common `step`, were of
        this adapter in its present version; the version changes with the weights.
        """
        return self._delivered is not None and self._delivered == (adapter, adapter.version)

    def broadcast_state(self, adapter: Adapter, optimizer: AdamW) -> None:
        """Copy this rank's weights of `adapter` and the state of its optimizer to all other ranks
        that train."""
        if not self.trainers:
            return
        has_moments = [parameter in optimizer.state for parameter in adapter.parameters()]
        self.carry_out(
            TakeState(has_moments),
            self.trainers,
            collective_call=lambda: collective.broadcast_state(adapter, optimizer, has_moments),
        )
        self._delivered = (adapter, adapter.version)

    def step(self, order: Any, adapter: Adapter, apply: Callable[[], float]) -> float:
        """Do an optimizer step on every rank that trains: their gradients are summed, then each
        applies the same step.

        Args:
            order: tells the other ranks to do so.
            adapter: this rank's adapter, whose gradients are summed with those of the others.
            apply: does the step on this rank, and returns the norm of the summed gradient.

        Returns that norm.
        """
        if not self.trainers:
            return apply()
        for rank in self.trainers:
            self.tell(rank, order)
        self._run_together(lambda: collective.sum_gradients(adapter.parameters()))
        norm = apply()
        for rank in self.trainers:
            self.answer(rank)
        self._delivered = (adapter, adapter.version)
        return norm

    def require_same_weights(self, fingerprint: bytes) -> None:
        """Check that the weights of all ranks that train have this fingerprint. Raises
        WorkerFailure (kind internal) if those of a rank differ: its gradients would be those of a
        model that is not saved."""
        fingerprints = self.carry_out(Fingerprint(), self.trainers)
        for rank, rank_fingerprint in zip(self.trainers, fingerprints, strict=True):
            if rank_fingerprint != fingerprint:
                raise WorkerFailure(
                    "internal",
                    f"Rank {rank} has other weights than rank 0.",
                    evidence=f"SHA-256 {rank_fingerprint.hex()[:16]} and {fingerprint.hex()[:16]}",
                )


def _copy_with_rank(lines: IO[bytes], rank: int) -> None:
    """Copy the lines that a rank prints to the console of the run, each with the rank's number in
    front. Runs in a thread."""
    for line in lines:
        with contextlib.suppress(OSError, ValueError):  # the console is full or closed
            sys.stderr.buffer.write(f"[rank {rank}] ".encode() + line)
            sys.stderr.buffer.flush()


def store_of(job: Job[RunConfig]) -> str:
    """Return the path of the file by which the processes (ranks) of a run find each other."""
    return str(job.run.ranks / "store")


def own_rank() -> int:
    """Return the number of this process among those of its run; 0 for the one that leads them."""
    return int(os.environ.get(RANK) or 0)


def rank_count() -> int:
    """Return how many processes (ranks) the run has, on a rank other than 0. Only those are told;
    on rank 0 this is always 1."""
    return int(os.environ.get(RANKS) or 1)
