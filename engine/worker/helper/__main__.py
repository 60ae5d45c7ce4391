"""One of the other ranks of a run: `python -P -m engine.worker.helper RUN_FOLDER`, a child of the
trainer, which is rank 0 (ranks/leader.py).

It loads what the trainer loads, except the environment, and then carries out orders until it is
told to end or the trainer is gone. It writes no file of the run: what it prints goes to the
trainer's console, and a failure is told to the trainer, which fails with it.
"""

import hashlib
import os
import sys
import traceback
from collections.abc import Callable
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
from engine.worker.network.adapter import Adapter
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler
from engine.worker.ranks import collective, messages
from engine.worker.ranks.leader import RANK_FD, own_rank, rank_count
from engine.worker.ranks.parts import Shareable
from engine.worker.update.policy_update import PolicyPass
from engine.worker.update.schedule import apply_step, make_optimizer
from envs.isolation import kernel

DONE, FAILED = 0, 3


class HelperJob(Job[TrainConfig]):
    """The run as a rank sees that writes nothing of it."""

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Nothing: rank 0 has the same to say, and says it."""


class Helper:
    """Carries out the orders of rank 0."""

    def __init__(self, job: Job[TrainConfig], socket: Connection) -> None:
        """Load model, adapter and sampler. The adapter's weights are those of a run that begins:
        rank 0 hands on its own before they count."""
        self.socket = socket
        components = prepare(job, Path(job.config.base.path))
        start = job.config.start_adapter
        settings = job.config.settings
        self.policy = Policy(components.base, settings, Path(start) if start else None)
        self.optimizer = make_optimizer(self.policy.parameters(), settings)
        self.sampler: Sampler = components.sampler
        self._handed_on: Adapter | None = None  # for weights that are not the policy's
        self._pass: Shareable | None = None
        self._orders: dict[type[Any], Callable[[Any], Any]] = {
            messages.TakeState: self._take_state,
            messages.Begin: self._begin,
            messages.Run: self._run,
            messages.Step: self._step,
            messages.Load: self._load,
            messages.Generate: self._generate,
            messages.ReleaseMemory: self._release_memory,
            messages.Fingerprint: self._fingerprint,
            messages.Join: self._join,
        }

    def serve(self) -> None:
        """Carry out orders until rank 0 says that the run is over. Raises EOFError where it is
        gone."""
        try:
            while not isinstance(order := self.socket.recv(), messages.End):
                self._orders[type(order)](order)
        finally:
            self.sampler.close()

    def _tell(self, message: Any) -> None:
        self.socket.send(message)

    def _join(self, order: messages.Join) -> None:
        self._tell(messages.Done())  # rank 0 connects once all are ready to
        collective.join(order.store, own_rank(), rank_count(), self.policy.device)

    def _take_state(self, order: messages.TakeState) -> None:
        collective.hand_on_state(self.policy.adapter, self.optimizer, order.has_moments)
        self._tell(messages.Done())

    def _begin(self, order: messages.Begin) -> None:
        self._pass = order.part.on(self.policy)

    def _run(self, order: messages.Run) -> None:
        """Do a pass over this rank's part. Memory that ran out is told; rank 0 then has all ranks
        do the pass again, in smaller microbatches."""
        batch_pass = self._pass
        assert batch_pass is not None  # `Begin` comes first
        torch.manual_seed(order.seed)
        self.policy.adapter.clear_gradients()  # of a pass that has failed
        if isinstance(batch_pass, PolicyPass):
            batch_pass.is_first_pass = order.first
        answer: messages.Done | messages.OutOfMemory
        try:
            answer = messages.Done(batch_pass.run(order.token_limit))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            answer = messages.OutOfMemory(str(error).strip() or type(error).__name__)
        if isinstance(answer, messages.OutOfMemory) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # after the except block, which keeps activations alive
        self._tell(answer)

    def _step(self, order: messages.Step) -> None:
        adapter = self.policy.adapter
        collective.sum_gradients(adapter.parameters())
        apply_step(self.optimizer, adapter, order.learning_rate, order.max_grad_norm)
        self._tell(messages.Done())

    def _load(self, order: messages.Load) -> None:
        adapter: Adapter | None = None
        if order.what == "policy":
            adapter = self.policy.adapter
        elif order.what == "handed on":
            adapter = self._handed_on = self._handed_on or self._new_adapter()
            collective.hand_on(adapter)
        self.sampler.load(adapter)
        self._tell(messages.Done())

    def _new_adapter(self) -> Adapter:
        """An adapter of the policy's shape, whose weights are replaced before it is used."""
        return self.policy.base.network.new_adapter(self.policy.adapter.spec, seed=0)

    def _generate(self, order: messages.Generate) -> None:
        def on_completion(index: int, _member: int, completion: Completion) -> None:
            self._tell(messages.Ended(index, completion))

        self.sampler.generate(order.prompts, 1, order.params, on_completion)
        self._tell(messages.Done())

    def _release_memory(self, _order: messages.ReleaseMemory) -> None:
        self.sampler.release_memory()
        self._tell(messages.Done())

    def _fingerprint(self, _order: messages.Fingerprint) -> None:
        digest = hashlib.sha256()
        for parameter in self.policy.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        self._tell(messages.Done(digest.digest()))


def main(folder: Path) -> int:
    """Serve rank 0 of the run in `folder` to the end. Returns the exit status, DONE or FAILED."""
    kernel.die_with_parent()  # whatever this process is doing then
    quiet_libraries()
    socket = Connection(int(os.environ[RANK_FD]))
    pulse.begin_for(lambda: socket.send(messages.Beat()))
    try:
        Helper(HelperJob(folder), socket).serve()
    except (EOFError, ConnectionError):  # rank 0 is gone: nobody is left to tell anything
        return FAILED
    except Exception as error:  # noqa: BLE001 - the top of the process: every failure is told
        traceback.print_exc()
        failure = explain(error)
        told = messages.Failed(failure.kind, failure.message, failure.evidence, failure.hint)
        socket.send(told)
        return FAILED
    collective.leave()
    return DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
