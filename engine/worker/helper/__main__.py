"""One of the other ranks of a run: `python -P -m engine.worker.helper RUN_FOLDER`, a child process
of the trainer, which is rank 0 (ranks/leader.py).

It loads what the trainer loads, except the environment, and then carries out orders until it is
told to end or the trainer is gone. It writes no file of the run. Its output goes to the trainer's
console, and it reports a failure to the trainer, which then fails too.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.worker.core.runtime import prepare as prepare_libraries

prepare_libraries()

import torch

from engine.records.run_config import TrainConfig
from engine.worker.components import prepare, quiet_libraries
from engine.worker.core import pulse
from engine.worker.core.failures import explain, out_of_memory
from engine.worker.core.job import Job
from engine.worker.core.trajectory import Completion
from engine.worker.network.adapter import Adapter, LoraSpec, fingerprint
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler
from engine.worker.ranks import collective, messages
from engine.worker.ranks.leader import RANK_FD, is_sharded, own_rank, rank_count
from engine.worker.ranks.lockstep import Lockstep
from engine.worker.ranks.parts import Shareable
from engine.worker.update.optimizer import AdamW
from engine.worker.update.policy_update import PolicyPass
from engine.worker.update.schedule import apply_step, make_optimizer
from envs.isolation import kernel

DONE, FAILED = 0, 3


class HelperJob(Job[TrainConfig]):
    """The run as seen by a rank that writes no file of it."""

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Write no event of the run, because rank 0 writes the same ones."""


class Helper:
    """Carries out the orders of rank 0. Each order is a message, handled by the method of its
    name."""

    def __init__(self, job: Job[TrainConfig], socket: Connection) -> None:
        """Load what the run of `job` needs: the model, and a sampler on it. Orders come, and
        answers go, through `socket`, the connection to rank 0."""
        self.socket = socket
        self.config = job.config
        components = prepare(job, Path(job.config.base.path))
        self.base = components.base
        self.sampler: Sampler = components.sampler
        self._received_adapter: Adapter | None = None  # holds weights other than the policy's
        self._batch_pass: Shareable | None = None
        self._handlers: dict[type[Any], Callable[[Any], Any]] = {
            messages.TakeState: self._take_state,
            messages.Begin: self._begin,
            messages.Run: self._run,
            messages.Step: self._step,
            messages.Load: self._load,
            messages.Generate: self._generate,
            messages.ReleaseMemory: self._release_memory,
            messages.Fingerprint: self._fingerprint,
            messages.Join: self._join,
            messages.Accompany: self._follow_other_ranks,
        }
        self._lockstep: Lockstep | None = None
        if is_sharded(job.config, rank_count()):
            self._lockstep = self._make_lockstep()

    @cached_property
    def policy(self) -> Policy:
        """The policy of a rank that trains, made when it is first needed. It begins with the
        weights of a new run, which rank 0 replaces by its own before they are used."""
        start = self.config.start_adapter
        return Policy(self.base, self.config.settings, Path(start) if start else None)

    @cached_property
    def optimizer(self) -> AdamW:
        """The optimizer of the policy's adapter, made when it is first needed. Rank 0 replaces its
        state before it is used."""
        return make_optimizer(self.policy.parameters(), self.config.settings)

    def serve(self) -> None:
        """Carry out the orders of rank 0, one after the other, until it says that the run is over.
        Raises EOFError if rank 0 is gone."""
        try:
            while not isinstance(order := self.socket.recv(), messages.End):
                self._handlers[type(order)](order)
        finally:
            self.sampler.close()

    def _send(self, message: Any) -> None:
        """Send rank 0 a message, one of the classes in ranks/messages.py."""
        self.socket.send(message)

    def _join(self, order: messages.Join) -> None:
        """Connect to the other ranks of the run, so that tensors can be exchanged. `order.meeting`
        says where they meet."""
        self._send(messages.Done())  # before joining: rank 0 joins once all ranks are about to
        with collective.errors_translated():
            collective.join(order.meeting, own_rank(), self.base.network.device)

    def _make_lockstep(self) -> Lockstep:
        """Make the object through which all ranks do every pass through the sharded base at the
        same time, and have the network call it before each pass."""
        network: Any = self.base.network  # transformers', whose import is not needed elsewhere
        lockstep = Lockstep(network, collective.lockstep_group(), _run_together)
        network.take_turn = lockstep.turn
        return lockstep

    def _follow_other_ranks(self, _order: messages.Accompany | None = None) -> None:
        """If the base is sharded, take part in the passes of other ranks until all ranks are
        idle: they need this rank's part of the layers. Otherwise do nothing."""
        if self._lockstep is not None:
            _ = self.policy  # made here if need be: an empty pass goes backward through its adapter
            self._lockstep.idle()

    def _take_state(self, order: messages.TakeState) -> None:
        """Receive from rank 0 the adapter's weights, and the optimizer's moments of those
        parameters for which rank 0 has any yet (`order.has_moments`)."""
        with collective.errors_translated():
            collective.broadcast_state(self.policy.adapter, self.optimizer, order.has_moments)
        self._send(messages.Done())

    def _begin(self, order: messages.Begin) -> None:
        """Make the pass over this rank's part of a batch, which `_run` then does."""
        self._batch_pass = order.part.on(self.policy)

    def _run(self, order: messages.Run) -> None:
        """Do a pass over this rank's part of the batch. If memory runs out, report that to rank 0,
        which then has all ranks repeat the pass in smaller microbatches."""
        batch_pass = self._batch_pass
        assert batch_pass is not None  # `Begin` comes first
        torch.manual_seed(order.seed)
        self.policy.adapter.clear_gradients()  # an earlier pass that failed may have left some
        if isinstance(batch_pass, PolicyPass):
            batch_pass.is_first_pass = order.first
        answer: messages.Done | messages.OutOfMemory
        try:
            answer = messages.Done(batch_pass.run(order.token_limit).read())
        except (RuntimeError, MemoryError) as error:
            # A pass over a sharded base cannot be abandoned: other ranks wait for its layers.
            if not out_of_memory(error) or self._lockstep is not None:
                raise
            answer = messages.OutOfMemory(str(error).strip() or type(error).__name__)
        if isinstance(answer, messages.OutOfMemory) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # not in the except block, whose error keeps activations alive
        self._send(answer)
        self._follow_other_ranks()

    def _step(self, order: messages.Step) -> None:
        """Add up the gradients of all ranks and do the optimizer step, as every rank does, so that
        all keep the same weights."""
        adapter = self.policy.adapter
        with collective.errors_translated():
            collective.sum_gradients(adapter.parameters())
        apply_step(self.optimizer, adapter, order.learning_rate, order.max_grad_norm)
        self._send(messages.Done())

    def _load(self, order: messages.Load) -> None:
        """Load into the sampler the weights that the order names: the policy's, those that rank 0
        hands on now, or none (the base alone)."""
        adapter: Adapter | None = None
        if order.what == "policy":
            adapter = self.policy.adapter
        elif order.what == "handed on":
            if self._received_adapter is None:
                self._received_adapter = self._new_adapter()
            adapter = self._received_adapter
            with collective.errors_translated():
                collective.broadcast_weights(adapter)
        self.sampler.load(adapter)
        self._send(messages.Done())

    def _new_adapter(self) -> Adapter:
        """Make an adapter of the policy's shape, whose weights are replaced before it is used."""
        return self.base.network.new_adapter(LoraSpec.from_settings(self.config.settings), seed=0)

    def _generate(self, order: messages.Generate) -> None:
        """Sample one completion for each prompt of the order, and send each to rank 0 when it
        ends."""

        def on_completion(index: int, _member: int, completion: Completion) -> None:
            """Send rank 0 the completion of the prompt at `index`."""
            self._send(messages.Ended(index, completion))

        self.sampler.generate(order.prompts, n=1, params=order.params, done=on_completion)
        self._send(messages.Done())
        self._follow_other_ranks()

    def _release_memory(self, _order: messages.ReleaseMemory) -> None:
        """Free the memory that the sampler does not need until its next call."""
        self.sampler.release_memory()
        self._send(messages.Done())

    def _fingerprint(self, _order: messages.Fingerprint) -> None:
        """Send rank 0 a hash of the policy's weights, which must be the same on all ranks."""
        self._send(messages.Done(fingerprint(self.policy.parameters())))


def main(folder: Path) -> int:
    """Serve rank 0 of the run in `folder` until the run is over. Returns the exit status, DONE or
    FAILED."""
    kernel.die_with_parent()  # the kernel kills this process if the trainer dies
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # ignored: rank 0 decides when the run is over
    quiet_libraries()
    socket = Connection(int(os.environ[RANK_FD]))
    pulse.begin_for(lambda: socket.send(messages.Beat()))
    try:
        Helper(HelperJob(folder), socket).serve()
    except (EOFError, ConnectionError):  # rank 0 is gone: nobody is left to tell anything
        return FAILED
    except Exception as error:  # noqa: BLE001 - the top of the process: every failure is told
        traceback.print_exc()
        with contextlib.suppress(OSError):  # rank 0 may be gone by now
            socket.send(_failure_message(error))
        return FAILED
    collective.leave()
    return DONE


def _run_together(call: Callable[[], None]) -> None:
    """Make `call`, this rank's side of an operation that all ranks do together. Its errors become
    those that `collective` raises."""
    with collective.errors_translated():
        call()


def _failure_message(error: Exception) -> messages.Failed:
    """Make the message that tells rank 0 of the error that ends this rank."""
    failure = explain(error)
    # A rank that is disconnected only suffers from the failure of another.
    is_consequence = isinstance(error, collective.Disconnected)
    return messages.Failed(
        failure.kind, failure.message, failure.evidence, failure.hint, is_consequence
    )


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no thread of a library may keep a process that is done
