"""A base and its adapters that answer on a vLLM server: many requests at once, each under its
model's name.

Only token ids are sent to the server and come back. The template, the stop rules and the refusal of
an adapter that changes nothing are the same as with our own sampler (own_models.py).
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.machine.processes.vllm_process import BASE, Plan, ServerDied, VllmProcess, rank_limit
from engine.worker.core.failures import WorkerFailure
from engine.worker.gateway.chat_request import Refused
from engine.worker.network.adapter import WEIGHTS, LoraSpec, read_adapter
from engine.worker.network.policy import known_ids, stop_ids_of
from engine.worker.rollouts.renderer import Renderer
from engine.worker.rollouts.samplers import cpu_threads
from engine.worker.rollouts.vllm_client import VllmError
from engine.worker.rollouts.vllm_sampler import VllmSampler, server_failure
from engine.worker.update.checkpoint import require_base

SAME_LOGPROBS = 1e-6  # an adapter that changes no log-probability by more than this does nothing
LEAST_RANK = 64  # the server accepts adapters up to this rank at least, which costs little memory


class VllmModels:
    """A base and its adapters on a vLLM server."""

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
        """Start the vLLM server according to `plan` and wait until it is ready; the base answers as
        the model `base_name`. Raises WorkerFailure if the server does not become ready.

        Args:
            folder: where adapters are copied to.
            log: the file for the server's output.
            thinking: whether prompts open a think block.
            base_weights: SHA-256 of the base's weight files, by file name; adapters made for other
                weights are refused. None to accept any adapter.
            argv: a program to run instead of the server, for tests only.
        """
        self.base_name = base_name
        self.base_weights = base_weights or {}
        self.folder = folder
        tokens = _read_tokens(plan.model)
        self.renderer = Renderer(tokens.tokenizer, tokens.stop_ids, thinking=thinking)
        self.limit = plan.max_length  # tokens of prompt and answer together
        self._folders: dict[str, Path] = {}  # model name -> its adapter's folder
        self._server_names: dict[str, str] = {}  # model name -> the name the server knows it by
        self._copies_made = 0
        self._lock = threading.Lock()
        self.process = VllmProcess(plan, log, argv)
        self.sampler = VllmSampler(
            self.process,
            folder=folder,
            stop_ids=tokens.stop_ids,
            vocab=tokens.vocab,
            model_vocab=tokens.model_vocab,
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Wait until the server answers. If it ends before that, close everything and raise
        WorkerFailure."""
        try:
            self.process.wait_ready()
        except ServerDied as error:
            self.close()
            raise server_failure(str(error), self.process) from error

    @property
    def is_alive(self) -> bool:
        """False once the server's process has ended."""
        return self.process.is_alive

    def names(self) -> list[str]:
        """Return the base's name, then those of the adapters in the order they were added."""
        return [self.base_name, *self._folders]

    def add(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under the model name `name`, replacing an earlier one of
        that name. Loading the same folder again does nothing.

        Raises:
            Refused: 409 if the adapter changes nothing, 400 if it cannot be read, does not fit or
                has too high a rank, 500 if vLLM fails. What was served before stays.
        """
        with self._lock:
            if self._folders.get(name) == folder:
                return
            self._check_adapter(name, folder)
            server_name = self._load_copy(folder)
            try:
                if self._logprob_difference(server_name) <= SAME_LOGPROBS:
                    raise Refused(409, f"The adapter of {name} gives the same logits as the base.")
            except Refused:  # no difference, or vLLM failed while it was measured
                self._unload(server_name)
                raise
            replaced_name = self._server_names.get(name)
            self._server_names[name] = server_name
            self._folders[name] = folder
            if replaced_name is not None:  # it was served until now
                self._unload(replaced_name)

    def _check_adapter(self, name: str, folder: Path) -> None:
        """Raise Refused (400) if the adapter in `folder`, of the model `name`, cannot be read, was
        made for other weights, or has a higher rank than the server accepts."""
        try:
            require_base(folder, self.base_weights)
            spec = LoraSpec.from_folder(folder)
            read_adapter(folder)  # raises if a number is not finite; vLLM would not
        except WorkerFailure as error:
            raise Refused(400, f"{error.message} {error.evidence}".strip()) from error
        max_rank = rank_limit(self.process.plan.lora_rank)
        if spec.rank > max_rank:
            raise Refused(
                400,
                f"{name} has rank {spec.rank}, this process takes up to {max_rank}: stop the"
                f" deployment of {self.base_name}, then deploy {name} first.",
            )

    @contextmanager
    def speaking_as(self, name: str) -> Iterator[VllmSampler]:
        """Context manager that yields a sampler which answers as the model `name`. Other models can
        answer at the same time.

        Raises:
            Refused: 404 for an unknown name, 500 if sampling fails inside.
        """
        server_name = self._server_name(name)
        try:
            yield self.sampler.speaking_as(server_name)
        except WorkerFailure as error:
            raise Refused(500, f"{error.message} {error.evidence}") from error

    def _server_name(self, name: str) -> str:
        """Return the name by which vLLM knows the model `name`. Raises Refused (404) for an unknown
        model."""
        server_name = BASE if name == self.base_name else self._server_names.get(name)
        if server_name is None:
            raise Refused(404, f"No model {name!r} here; there are {', '.join(self.names())}.")
        return server_name

    def prompt_logprobs(self, name: str, ids: list[int]) -> list[float]:
        """Return the log-probability in nats of every id but the first under the model `name`.
        Raises Refused: 404 for an unknown name, 500 if vLLM fails."""
        server_name = self._server_name(name)
        if len(ids) < 2:
            return []  # nothing precedes the only id
        try:
            return self.sampler.client.prompt_logprobs(server_name, ids)
        except VllmError as error:
            raise Refused(500, f"vLLM did not answer: {error}") from error

    def close(self) -> None:
        """End the vLLM server and remove the copies of adapters."""
        self.sampler.close()

    def _load_copy(self, folder: Path) -> str:
        """Copy the adapter into a new folder and let vLLM load the copy, so that later changes of
        the original do no harm. Returns the name by which vLLM knows the copy.

        Name and folder are new each time, because vLLM's prefix cache tells adapters apart only by
        these two.

        Raises:
            Refused: 400, if vLLM does not load the copy.
        """
        self._copies_made += 1
        server_name = f"adapter-{self._copies_made}"
        copy_folder = self.folder / server_name
        copy_folder.mkdir(parents=True)
        for file in ("adapter_config.json", WEIGHTS):
            shutil.copyfile(folder / file, copy_folder / file)
        try:
            self.sampler.client.load(server_name, copy_folder)
        except VllmError as error:
            shutil.rmtree(copy_folder, ignore_errors=True)
            raise Refused(400, f"The adapter cannot be loaded: {error}") from error
        return server_name

    def _unload(self, server_name: str) -> None:
        """Unload from vLLM the adapter that it knows as `server_name`, and delete its copy. Raises
        Refused (500) if vLLM fails."""
        try:
            self.sampler.client.unload(server_name)
        except VllmError as error:
            raise Refused(500, f"vLLM did not let go of an adapter: {error}") from error
        shutil.rmtree(self.folder / server_name, ignore_errors=True)

    def _logprob_difference(self, server_name: str) -> float:
        """Return the largest absolute difference that the adapter which vLLM knows as `server_name`
        makes to the log-probability of a token, over one fixed prompt. Raises Refused (500) if vLLM
        fails."""
        ids = self.renderer.prompt([{"role": "user", "content": "What is 12 + 30? Say hello."}])
        client = self.sampler.client
        try:
            adapter_logprobs = client.prompt_logprobs(server_name, ids)
            base_logprobs = client.prompt_logprobs(BASE, ids)
        except VllmError as error:
            raise Refused(500, f"vLLM did not answer: {error}") from error
        logprob_pairs = zip(adapter_logprobs, base_logprobs, strict=True)
        return max(abs(of_adapter - of_base) for of_adapter, of_base in logprob_pairs)


@dataclass(frozen=True)
class _Tokens:
    """What is known of a model's tokens without its weights.

    Attributes:
        stop_ids: the ids that end a turn.
        vocab: how many ids have a token.
        model_vocab: how many ids the model can sample; often more, as its embedding is padded.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    vocab: int
    model_vocab: int


def _read_tokens(folder: Path) -> _Tokens:
    """Read the tokenizer of the model in `folder`, which ids end a turn, and how many ids there
    are. No weights are read."""
    model = _model_without_weights(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return _Tokens(
        tokenizer,
        stop_ids=stop_ids_of(model.config, tokenizer, folder),
        vocab=known_ids(model.config, tokenizer),
        model_vocab=int(model.config.get_text_config().vocab_size),  # padding included
    )


def _model_without_weights(folder: Path) -> PreTrainedModel:
    """Make the model in `folder` with its configuration and generation settings, but without
    weights. That is enough to tell which token ids exist and which of them end a turn."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):  # allocates no memory for weights
        model = AutoModelForCausalLM.from_config(config)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def serving_plan(
    python: Path, model: Path, device: str, *, rank: int, share: float, length: int
) -> Plan:
    """Return the settings with which a deployment's vLLM server is started.

    Args:
        python: the interpreter of the environment with vLLM.
        model: the base model's folder.
        device: the device that is reserved for this process, `cpu` or `cuda:N`.
        rank: the rank of the adapter that the server is started for; 0 if it is started without
            one.
        share: the share of a GPU's memory that it may use, limited to 0.05 to 0.9.
        length: the most tokens of prompt and answer together; 0 for the model's whole context.
    """
    on_gpu = device.startswith("cuda")
    gpu_share = min(0.9, max(0.05, share))
    cpu_cache_bytes = 2**30  # for keys and values
    config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    # 4096 is assumed if the model's config does not give the length of its context.
    context = int(getattr(config, "max_position_embeddings", None) or 4096)
    # On a CPU the limits are lower, since keys and values have only 1 GiB of memory there.
    gpu_length, cpu_length = min(context, length or context), min(context, 4096)
    return Plan(
        python=python,
        model=model,
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        max_length=gpu_length if on_gpu else cpu_length,
        rows=256 if on_gpu else 64,  # answers at once
        lora_rank=max(LEAST_RANK, rank),
        adapters=4,  # how many can be in use at once
        # A share of the memory on a GPU, a number of bytes on a CPU.
        memory=gpu_share if on_gpu else cpu_cache_bytes,
        threads=cpu_threads(),
    )
