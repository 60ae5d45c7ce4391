"""Sampling on a vLLM server of our own; the same seam as engine/worker/network/sampler.py.

Every version of an adapter gets a directory and a name of its own: vLLM's prefix cache tells
adapters apart by these two alone, so new weights under an old pair would be answered from keys and
values that the old weights computed. The new version is loaded before the old one is given up.
"""

import asyncio
import copy
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.processes.vllm_process import BASE, ServerDied, VllmProcess
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.trajectory import Completion
from engine.worker.network.adapter import Adapter, save_adapter
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.vllm_client import Answer, Body, Together, VllmClient, VllmError

NEVER = -100.0  # what vLLM takes at most as a bias; exp(-100) is no probability
ASKED_AT_ONCE = 256

Done = Callable[[int, int, Completion], None]


class VllmSampler:
    """See the module.

    Args:
        process: the server; it may still be starting.
        folder: where versions of adapters are written for it; emptied first.
        stop_ids: ids that end a completion.
        vocab: ids at or above it are never sampled (padded vocabularies hold ids without a token).
        model_vocab: ids the model has, those without a token included.
        on_wait: called while the server starts; may raise to end the wait.
    """

    name = "vllm"

    def __init__(
        self,
        process: VllmProcess,
        *,
        folder: Path,
        stop_ids: Sequence[int],
        vocab: int,
        model_vocab: int,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.process = process
        self.client = VllmClient(process)
        self.stop_ids = list(stop_ids)
        self.limit = process.plan.max_length
        self.missing = 0  # sampled ids that came without a log-probability
        self._never = {str(token): NEVER for token in range(vocab, model_vocab)}
        self._folder = folder
        self._on_wait = on_wait
        self._speaking = BASE
        self._loaded: tuple[Adapter, int] | None = None  # which adapter, at which version
        self._number = 0
        self._asleep = False
        shutil.rmtree(folder, ignore_errors=True)

    def load(self, adapter: Adapter | None) -> None:
        """Sample from base + adapter as it is now; None: from the base.

        Raises:
            WorkerFailure: kind infra, when the server does not take it.
        """
        self._ready()
        wanted = None if adapter is None else (adapter, adapter.version)
        if _same(wanted, self._loaded):
            return
        old, name = self._speaking, BASE
        with _ServerErrors("take the adapter", self.process):
            if adapter is not None:
                self._number += 1
                name = f"version-{self._number}"
                folder = self._folder / name
                folder.mkdir(parents=True)
                save_adapter(adapter, folder, BASE)
                self.client.load(name, folder)
            self._speaking, self._loaded = name, wanted
            if old != BASE:
                self.client.unload(old)
        if old != BASE:
            shutil.rmtree(self._folder / old, ignore_errors=True)

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: Done | None = None,
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in the order given. `done` is called with the members
        of a prompt as soon as its last one has ended.

        Raises:
            WorkerFailure: kind infra, with the last words of the server's log.
        """
        self._ready()
        with _ServerErrors("sample", self.process):
            return asyncio.run(self._generate(prompts, n, params, done))

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Ids of one completion as they are sampled, the end token included."""
        self._ready()
        room = self.limit - len(prompt)
        if room < 1:
            return
        with _ServerErrors("sample", self.process):
            for ids in self.client.stream(
                self._speaking, prompt, self._sampling(params, 0, 1, room)
            ):
                yield from ids

    def speaking_as(self, model: str) -> "VllmSampler":
        """The same server, answering as `model` whatever this one loads."""
        other = copy.copy(self)
        other._speaking = model
        return other

    def release_memory(self) -> None:
        """Hand the device's memory back until the sampler is asked again; nothing on a CPU."""
        if self.process.plan.sleeps and not self._asleep:
            self._ready()
            with _ServerErrors("sleep", self.process):
                self.client.sleep()
            self._asleep = True

    def close(self) -> None:
        """End the server and remove what was written for it."""
        self.process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _generate(
        self, prompts: Sequence[list[int]], n: int, params: SamplingParams, done: Done | None
    ) -> list[list[Completion]]:
        slots = asyncio.Semaphore(ASKED_AT_ONCE)
        async with self.client.together() as together, asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._one(together, slots, index, prompt, n, params, done))
                for index, prompt in enumerate(prompts)
            ]
        return [task.result() for task in asked]

    async def _one(
        self,
        together: Together,
        slots: asyncio.Semaphore,
        index: int,
        prompt: list[int],
        n: int,
        params: SamplingParams,
        done: Done | None,
    ) -> list[Completion]:
        """The `n` completions of one prompt."""
        room = self.limit - len(prompt)
        if room < 1:  # nothing can be said after a prompt that fills the context
            answers = [Answer([], [], False)] * n
        else:
            async with slots:
                sampling = self._sampling(params, index, n, room)
                answers = await together.ask(self._speaking, prompt, sampling)
        if len(answers) != n:
            raise VllmError(f"{n} completions were asked for, {len(answers)} came")
        completions = [Completion(a.ids, a.logprobs, a.finished) for a in answers]
        self.missing += sum(math.isnan(value) for a in answers for value in a.logprobs)
        if done is not None:
            for member, completion in enumerate(completions):
                done(index, member, completion)
        return completions

    def _sampling(self, params: SamplingParams, index: int, n: int, room: int) -> Body:
        """The request for prompt `index`; vLLM gives member k the seed plus k."""
        request: Body = {
            "n": n,
            "max_tokens": min(params.max_tokens, room),
            "temperature": params.temperature,
            "top_p": params.top_p if params.temperature else 1.0,
            "logprobs": 0,  # of the sampled id alone
            "stop_token_ids": self.stop_ids,
            "detokenize": bool(params.stop),
        }
        if params.temperature:
            request["seed"] = prompt_seed(params.seed, index)
        if params.stop:
            request["stop"] = list(params.stop)
        if self._never:
            request["logit_bias"] = self._never
        return request

    def _ready(self) -> None:
        try:
            self.process.wait_ready(on_wait=self._on_wait)
        except ServerDied as error:
            raise server_failure(str(error), self.process) from error
        if self._asleep:
            with _ServerErrors("wake up", self.process):
                self.client.wake()
            self._asleep = False


def _same(one: tuple[Adapter, int] | None, other: tuple[Adapter, int] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]


def prompt_seed(seed: int, index: int) -> int:
    """The seed of prompt `index` of a call: 56 bits, so that members can be added to it."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def server_failure(message: str, process: VllmProcess) -> WorkerFailure:
    """The failure of a run whose vLLM did not do its part, memory told apart from the rest."""
    last = process.last_words()
    evidence = message if last in message else f"{message}; its log ends: {last}"
    if any(mark in evidence for mark in ("out of memory", "OutOfMemory", "No available memory")):
        hint = "Lower max_length or prompts_per_step, or set sampler torch; then submit again."
        return WorkerFailure("oom", "vLLM ran out of memory.", evidence=evidence, hint=hint)
    hint = f"Read {process.log}; with sampler torch the run needs no vLLM. Resume goes on."
    return WorkerFailure("infra", "vLLM stopped working.", evidence=evidence, hint=hint)


class _ServerErrors:
    """Turns a server's error into the failure of the run; `what` it was asked to do."""

    def __init__(self, what: str, process: VllmProcess) -> None:
        self._what = what
        self._process = process

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        while isinstance(error, BaseExceptionGroup):  # one of many requests made at once
            error = error.exceptions[0]
        if isinstance(error, VllmError):
            message = f"asked to {self._what}: {error}"
            raise server_failure(message, self._process) from error
