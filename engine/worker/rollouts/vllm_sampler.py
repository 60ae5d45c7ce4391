"""Sampling on a vLLM server of our own, with the interface of engine/worker/network/sampler.py.

Every version of an adapter gets a folder and a name of its own. vLLM's prefix cache tells adapters
apart only by these two, so new weights under an old pair would be combined with keys and values
that the old weights computed. The new version is loaded before the old one is unloaded.
"""

import asyncio
import copy
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.machine.processes.vllm_process import BASE, ServerDied, VllmProcess
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.runtime import release_memory
from engine.worker.core.trajectory import Completion
from engine.worker.network.adapter import Adapter, save_adapter
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.vllm_client import Answer, Body, Together, VllmClient, VllmError

# The lowest bias that vLLM accepts for an id; it is then practically never sampled.
NEVER = -100.0
MAX_PROMPTS_AT_ONCE = 256

Done = Callable[[int, int, Completion], None]


class VllmSampler:
    """A sampler that runs on a vLLM server. Each version of an adapter has its own name there."""

    name = "vllm"
    samples_elsewhere = samples_beside_training = True

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
        """Sample on the server `process`, which may still be starting.

        Args:
            folder: where versions of adapters are written for the server; emptied here.
            stop_ids: ids that end a completion.
            vocab: how many ids have a token.
            model_vocab: how many ids the model could sample; those from `vocab` on are forbidden.
            on_wait: called repeatedly while the server starts; may raise to end the wait.
        """
        self.process = process
        self.client = VllmClient(process)
        self.stop_ids = list(stop_ids)
        self.limit = process.plan.max_length  # tokens of prompt and completion together
        self.missing_logprobs = 0  # how many sampled ids came without a log-probability
        # Ids that must never be sampled, in the form of vLLM's logit_bias.
        self._forbidden_ids = {str(token): NEVER for token in range(vocab, model_vocab)}
        self._folder = folder
        self._on_wait = on_wait
        self._model_name = BASE  # the server's name for what was loaded last
        self._loaded: tuple[Adapter, int] | None = None  # the loaded adapter and its version
        self._versions_made = 0
        self._asleep = False
        shutil.rmtree(folder, ignore_errors=True)

    def load(self, adapter: Adapter | None) -> None:
        """Sample from now on with the adapter as it is at this moment, or with the base alone if
        `adapter` is None. Does nothing if the same version is already loaded.

        Raises:
            WorkerFailure: kind infra, if the server does not load the adapter, or kind oom, if its
                memory ran out.
        """
        self._wait_until_ready()
        new_version = None if adapter is None else (adapter, adapter.version)
        if _is_same_version(new_version, self._loaded):
            return
        old_name = self._model_name
        with _ServerErrors("take the adapter", self.process):
            self._model_name = BASE if adapter is None else self._send(adapter)
            self._loaded = new_version
            if old_name != BASE:
                self.client.unload(old_name)
        if old_name != BASE:  # the base has no folder
            shutil.rmtree(self._folder / old_name, ignore_errors=True)

    def _send(self, adapter: Adapter) -> str:
        """Write the adapter to a new folder and let the server load it. Returns the name by which
        the server knows it. Raises VllmError."""
        self._versions_made += 1
        name = f"version-{self._versions_made}"
        folder = self._folder / name
        folder.mkdir(parents=True)
        save_adapter(adapter, folder, base_ref=BASE)
        self.client.load(name, folder)
        return name

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: Done | None = None,
    ) -> list[list[Completion]]:
        """Sample `n` completions of each prompt, and return them in the order of `prompts`.

        Once all completions of a prompt have ended, `done` is called for each of them with (index
        of the prompt, number of the completion, completion). Raises WorkerFailure of kind infra or
        oom.
        """
        self._wait_until_ready()
        with _ServerErrors("sample", self.process):
            return asyncio.run(self._request_all(_GenerateCall(prompts, n, params, done)))

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        """Yield the ids of one completion as they are sampled, including the end token. Yields
        nothing if the prompt fills the context. Raises WorkerFailure of kind infra or oom."""
        self._wait_until_ready()
        room = self.limit - len(prompt)
        if room < 1:  # the prompt fills the context
            return
        with _ServerErrors("sample", self.process):
            sampling = self._sampling_fields(params, index=0, n=1, room=room)
            for ids in self.client.stream(self._model_name, prompt, sampling):
                yield from ids

    def speaking_as(self, model: str) -> "VllmSampler":
        """Return a sampler on the same server that answers as the model `model` of that server,
        whatever this one loads later."""
        sampler = copy.copy(self)  # shallow: both use the same server
        sampler._model_name = model
        return sampler

    def release_memory(self) -> None:
        """Free the GPU's memory until the sampler is used again. Does nothing on a CPU, or if the
        memory is already free."""
        if self.process.plan.sleeps and not self._asleep:
            self._wait_until_ready()
            with _ServerErrors("sleep", self.process):
                self.client.sleep()
            self._asleep = True

    def close(self) -> None:
        """End the server and remove the files that were written for it."""
        self.process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _request_all(self, call: "_GenerateCall") -> list[list[Completion]]:
        """Request the completions of all prompts of `call`, with at most `MAX_PROMPTS_AT_ONCE`
        prompts at the server at the same time. Raises VllmError, alone or in an exception group."""
        slots = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
        async with self.client.together() as together, asyncio.TaskGroup() as tasks:
            requests = [
                tasks.create_task(self._complete_prompt(together, slots, call, index))
                for index in range(len(call.prompts))
            ]
        return [task.result() for task in requests]

    async def _complete_prompt(
        self, together: Together, slots: asyncio.Semaphore, call: "_GenerateCall", index: int
    ) -> list[Completion]:
        """Wait for a free slot, request the completions of the prompt at `index`, and return them.
        Calls `call.done` for each completion once all have come.

        Args:
            together: sends requests at the same time.
            slots: has a slot for each prompt that may be at the server at once.

        Raises:
            VllmError: the request fails, or the reply has another number of completions.
        """
        answers = await self._send_prompt(together, slots, call, index)
        if len(answers) != call.n:
            raise VllmError(f"{call.n} completions were asked for, {len(answers)} came")
        completions = [
            Completion(answer.ids, answer.logprobs, answer.finished) for answer in answers
        ]
        logprobs = [logprob for answer in answers for logprob in answer.logprobs]
        self.missing_logprobs += sum(math.isnan(logprob) for logprob in logprobs)
        if call.done is not None:
            for member, completion in enumerate(completions):
                call.done(index, member, completion)
        return completions

    async def _send_prompt(
        self, together: Together, slots: asyncio.Semaphore, call: "_GenerateCall", index: int
    ) -> list[Answer]:
        """Send the prompt at `index` of `call` through `together` once one of the `slots` is free,
        and return the server's answers. If the prompt fills the context, nothing is sent, and the
        answers are empty."""
        prompt = call.prompts[index]
        room = self.limit - len(prompt)
        if room < 1:
            return [Answer(ids=[], logprobs=[], finished=False)] * call.n
        async with slots:
            sampling = self._sampling_fields(call.params, index, n=call.n, room=room)
            return await together.ask(self._model_name, prompt, sampling)

    def _sampling_fields(self, params: SamplingParams, index: int, n: int, room: int) -> Body:
        """Return vLLM's sampling parameters for the prompt at `index`.

        Args:
            n: how many completions are wanted; vLLM draws completion k with the seed plus k.
            room: tokens that the prompt leaves in the context.
        """
        request: Body = {
            "n": n,
            "max_tokens": min(params.max_tokens, room),
            "temperature": params.temperature,
            # With temperature 0 the most probable id is taken, so top_p has no meaning.
            "top_p": params.top_p if params.temperature else 1.0,
            "logprobs": 0,  # only that of the sampled id
            "stop_token_ids": self.stop_ids,
            "detokenize": bool(params.stop),  # only stop strings need text
        }
        if params.temperature:  # with 0 nothing is drawn, so these have no meaning
            # `places` says where in a larger batch the prompt stands, if this is a part of one:
            # (number of the prompt, number of the completion).
            prompt, member = params.places[index] if params.places else (index, 0)
            request["seed"] = prompt_seed(params.seed, prompt) + member
            if params.top_k:
                request["top_k"] = params.top_k
            if params.min_p:
                request["min_p"] = params.min_p
        if params.stop:
            request["stop"] = list(params.stop)
        if self._forbidden_ids:
            request["logit_bias"] = self._forbidden_ids
        return request

    def _wait_until_ready(self) -> None:
        """Wait until the server has started, and wake it up if it sleeps. Raises WorkerFailure if
        it does not start or wake up."""
        try:
            self.process.wait_ready(on_wait=self._on_wait)
        except ServerDied as error:
            raise server_failure(str(error), self.process) from error
        if self._asleep:
            release_memory()  # torch may still hold freed memory, which the server needs now
            with _ServerErrors("wake up", self.process):
                self.client.wake()
            self._asleep = False


@dataclass(frozen=True)
class _GenerateCall:
    """The arguments of a call of `VllmSampler.generate`."""

    prompts: Sequence[list[int]]
    n: int
    params: SamplingParams
    done: Done | None


def _is_same_version(first: tuple[Adapter, int] | None, second: tuple[Adapter, int] | None) -> bool:
    """Tell whether both are the same adapter at the same version, or both the base alone. Each is
    (adapter, version), or None for the base alone."""
    if first is None or second is None:
        return first is second  # True if both are None
    first_adapter, first_version = first
    second_adapter, second_version = second
    return first_adapter is second_adapter and first_version == second_version


def prompt_seed(seed: int, index: int) -> int:
    """Derive the seed of the prompt at `index` from the seed of the whole call. It has 56 bits, so
    that vLLM can add the number of a completion without exceeding 64 bits."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def server_failure(message: str, process: VllmProcess) -> WorkerFailure:
    """Return the failure of a run whose vLLM server failed, with the end of the server's log as
    evidence. Its kind is oom if the message or the log says that memory ran out, otherwise
    infra."""
    log_end = process.last_words()
    evidence = message
    if log_end not in message:
        evidence += f"; its log ends: {log_end}"
    # These are the words with which torch and vLLM report that memory ran out.
    if any(mark in evidence for mark in ("out of memory", "OutOfMemory", "No available memory")):
        hint = "Lower max_length or prompts_per_step, or set sampler torch; then submit again."
        return WorkerFailure("oom", "vLLM ran out of memory.", evidence=evidence, hint=hint)
    hint = f"Read {process.log}; with sampler torch the run needs no vLLM. Resume goes on."
    return WorkerFailure("infra", "vLLM stopped working.", evidence=evidence, hint=hint)


class _ServerErrors:
    """Context manager that turns VllmError into the failure of the run."""

    def __init__(self, action: str, process: VllmProcess) -> None:
        """`action` is what the server `process` is asked to do, such as "sample"; it completes
        "asked to ..." in the failure's message."""
        self._action = action
        self._process = process

    def __enter__(self) -> None:
        """Do nothing; only the end of the context matters."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """If a VllmError ended the context, alone or first in a group, raise the run's failure
        instead. Other errors are left as they are."""
        # Requests made at the same time fail as a group: its first error stands for all.
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, VllmError):
            message = f"asked to {self._action}: {error}"
            raise server_failure(message, self._process) from error
