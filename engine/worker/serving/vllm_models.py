"""A base and its adapters answering on a vLLM server: many at once, each under its own name.

Only token ids go to the server and come back: template, stop rules and the refusal of an adapter
that changes nothing are the same as with our own sampler (engine/worker/serving/own_models.py).
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from engine.processes.vllm_process import BASE, Plan, ServerDied, VllmProcess, rank_limit
from engine.worker.core.failures import WorkerFailure
from engine.worker.network.adapter import WEIGHTS, LoraSpec, read_adapter
from engine.worker.network.policy import known_ids, stop_ids_of
from engine.worker.rollouts.renderer import Renderer
from engine.worker.rollouts.samplers import cpu_threads
from engine.worker.rollouts.vllm_client import VllmError
from engine.worker.rollouts.vllm_sampler import VllmSampler, server_failure
from engine.worker.serving.chat_request import Refused
from engine.worker.update.checkpoint import require_base

SAME_LOGPROBS = 1e-6
LEAST_RANK = 64  # room for adapters that come later; a slot of this rank costs little


class VllmModels:
    """See the module.

    Args:
        plan: how the server is run; `rank` of adapters is at least 64 in it.
        base_name: the model name the base answers to.
        folder: where adapters are copied to, so that nothing of theirs changes under the server.
        log: the server's output.
        thinking: whether prompts open a think block.
        base_weights: SHA-256 of the base's weight files; adapters made for others are refused.
        argv: another program in the server's place; tests only.

    Raises:
        WorkerFailure: when the server does not become ready.
    """

    def __init__(
        self,
        plan: Plan,
        base_name: str,
        *,
        folder: Path,
        log: Path,
        thinking: bool,
        base_weights: dict[str, str] | None = None,
        argv: tuple[str, ...] = (),
    ) -> None:
        self.base_name = base_name
        self.base_weights = base_weights or {}
        self.folder = folder
        facts = _without_weights(plan.model)
        tokenizer = AutoTokenizer.from_pretrained(plan.model, trust_remote_code=False)
        stop_ids = stop_ids_of(facts.config, tokenizer, Path(plan.model))
        self.renderer = Renderer(tokenizer, stop_ids, thinking=thinking)
        self.limit = plan.max_length
        self.adapters: dict[str, str] = {}
        self._slots: dict[str, str] = {}  # model name -> the name the server knows it by
        self._number = 0
        self._lock = threading.Lock()
        self.process = VllmProcess(plan, log, argv)
        self.sampler = VllmSampler(
            self.process,
            folder=folder,
            stop_ids=stop_ids,
            vocab=known_ids(facts.config, tokenizer),
            model_vocab=int(facts.config.get_text_config().vocab_size),
        )
        try:
            self.process.wait_ready()
        except ServerDied as error:
            self.close()
            raise server_failure(str(error), self.process) from error

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    def names(self) -> list[str]:
        return [self.base_name, *self.adapters]

    def add(self, name: str, folder: Path) -> None:
        """Load an adapter under a model name; loading the same one again does nothing.

        Raises:
            Refused: 409 when it changes nothing, 400 when it does not fit.
        """
        with self._lock:
            if self.adapters.get(name) == str(folder):
                return
            try:
                require_base(folder, self.base_weights)
                spec = LoraSpec.from_folder(folder)
                read_adapter(folder)  # finite numbers in safetensors, or it goes no further
            except WorkerFailure as error:
                raise Refused(400, f"{error.message} {error.evidence}".strip()) from error
            most = rank_limit(self.process.plan.lora_rank)
            if spec.rank > most:
                raise Refused(
                    400,
                    f"{name} has rank {spec.rank}, this process takes up to {most}: stop the"
                    f" deployment of {self.base_name}, then deploy {name} first.",
                )
            slot = self._load(folder)
            try:
                if self._difference(slot) <= SAME_LOGPROBS:
                    raise Refused(409, f"The adapter of {name} gives the same logits as the base.")
            except Refused:
                self._unload(slot)
                raise
            old = self._slots.get(name)
            self._slots[name] = slot
            self.adapters[name] = str(folder)
            if old is not None:
                self._unload(old)

    @contextmanager
    def speaking_as(self, name: str) -> Iterator[VllmSampler]:
        """A sampler that answers as the model called `name`, beside whatever others answer."""
        slot = BASE if name == self.base_name else self._slots.get(name)
        if slot is None:
            raise Refused(404, f"No model {name!r} here; there are {', '.join(self.names())}.")
        try:
            yield self.sampler.speaking_as(slot)
        except WorkerFailure as error:
            raise Refused(500, f"{error.message} {error.evidence}") from error

    def close(self) -> None:
        self.sampler.close()

    def _load(self, folder: Path) -> str:
        """A copy under a name and in a directory that no other adapter ever had."""
        self._number += 1
        slot = f"adapter-{self._number}"
        own = self.folder / slot
        own.mkdir(parents=True)
        for file in ("adapter_config.json", WEIGHTS):
            shutil.copyfile(folder / file, own / file)
        try:
            self.sampler.client.load(slot, own)
        except VllmError as error:
            shutil.rmtree(own, ignore_errors=True)
            raise Refused(400, f"The adapter cannot be loaded: {error}") from error
        return slot

    def _unload(self, slot: str) -> None:
        try:
            self.sampler.client.unload(slot)
        except VllmError as error:
            raise Refused(500, f"vLLM did not let go of an adapter: {error}") from error
        shutil.rmtree(self.folder / slot, ignore_errors=True)

    def _difference(self, slot: str) -> float:
        """Largest change of a log-probability along a fixed prompt."""
        ids = self.renderer.prompt([{"role": "user", "content": "What is 12 + 30? Say hello."}])
        client = self.sampler.client
        try:
            tuned, plain = client.prompt_logprobs(slot, ids), client.prompt_logprobs(BASE, ids)
        except VllmError as error:
            raise Refused(500, f"vLLM did not answer: {error}") from error
        return max(abs(a - b) for a, b in zip(tuned, plain, strict=True))


def _without_weights(folder: Path) -> PreTrainedModel:
    """The model as its folder describes it: what its ids mean, and no memory for weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def serving_plan(python: Path, model: Path, device: str, *, rank: int, share: float) -> Plan:
    """How a deployment's server is run.

    Args:
        device: a leased device id, `cpu` or `cuda:N`.
        rank: of the adapter it is started for; 0 for none.
        share: of a GPU's memory it may take.
    """
    cpu = not device.startswith("cuda")
    config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    context = int(getattr(config, "max_position_embeddings", None) or 4096)
    return Plan(
        python=python,
        model=model,
        device="cpu" if cpu else "cuda",
        dtype="float32" if cpu else "bfloat16",
        max_length=min(context, 4096) if cpu else context,
        rows=64 if cpu else 256,
        lora_rank=max(LEAST_RANK, rank),
        adapters=4,
        memory=2**30 if cpu else min(0.9, max(0.1, share)),
        threads=cpu_threads(),
    )
