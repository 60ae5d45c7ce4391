"""A base and its adapters that answer on our own sampler, one request at a time.

An adapter that changes nothing is refused, because serving the base under a tuned model's name
would look like success.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.worker.components import make_sampler, set_threads
from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.gateway.chat_request import Refused
from engine.worker.network.adapter import Adapter, LoraSpec, read_adapter
from engine.worker.network.policy import load_base, pick_device
from engine.worker.network.sampler import Sampler
from engine.worker.rollouts.renderer import Renderer
from engine.worker.update.checkpoint import require_base

SAME_LOGITS = 1e-6  # an adapter that changes no logit by more than this changes nothing


class OwnModels:
    """A base and its adapters on our own sampler."""

    def __init__(
        self,
        base_path: Path,
        base_name: str,
        device: str,
        *,
        thinking: bool,
        base_weights: dict[str, str] | None = None,
        comparisons_file: Path | None = None,
    ) -> None:
        """Load the base in `base_path` on the device; it answers as the model `base_name`. Raises
        WorkerFailure (kind config) if it cannot be loaded.

        Args:
            thinking: whether prompts open a think block.
            base_weights: SHA-256 of the base's weight files, by file name; adapters made for other
                weights are refused. None to accept any adapter.
            comparisons_file: stores, for later starts, whether our own forward pass agreed with
                that of transformers. None to store nothing.
        """
        set_threads()
        self.base_weights = base_weights or {}
        self.base = load_base(
            base_path,
            pick_device(device),
            precision="auto",
            comparisons_file=comparisons_file,
        )
        self.base_name = base_name
        self.renderer = Renderer(self.base.tokenizer, self.base.stop_ids, thinking=thinking)
        self.sampler = make_sampler(self.base, self.renderer)
        self._folders: dict[str, Path] = {}  # model name -> its adapter's folder
        self._loaded: dict[str, Adapter] = {}  # by model name
        self.lock = threading.Lock()  # held while an answer is sampled or an adapter loaded
        self.limit = self.base.network.shape.context  # tokens of prompt and answer together

    @property
    def is_alive(self) -> bool:
        """Always True: this sampler has no process of its own that could die."""
        return True

    def names(self) -> list[str]:
        """Return the base's name, then those of the adapters in the order they were added."""
        return [self.base_name, *self._folders]

    def add(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` under the model name `name`, replacing an earlier one of
        that name. Loading the same folder again does nothing.

        Raises:
            Refused: 409 if the adapter gives the same answers as the base, 400 if it cannot be read
                or does not fit the base. An earlier adapter of that name then stays.
        """
        if self._folders.get(name) == folder:
            return  # before taking the lock, which a long answer in progress would hold
        with self.lock:
            if self._folders.get(name) == folder:
                return  # another request has loaded it in the meantime
            try:
                new_adapter = self._load(name, folder)  # may also raise Refused (409)
            except WorkerFailure as error:
                raise Refused(400, f"{error.message} {error.evidence}".strip()) from error
            replaced_adapter = self._loaded.get(name)
            self._loaded[name] = new_adapter
            self._folders[name] = folder
            if replaced_adapter is not None:
                self.base.network.drop_adapter(replaced_adapter)

    def _load(self, name: str, folder: Path) -> Adapter:
        """Load the adapter in `folder`, which will be served as the model `name`.

        Raises:
            WorkerFailure: it cannot be read or does not fit the base.
            Refused: 409, it gives the same answers as the base.
        """
        network = self.base.network
        require_base(folder, self.base_weights)
        state = read_adapter(folder)
        # Any seed: the initial weights are replaced at once.
        adapter = network.new_adapter(LoraSpec.from_folder(folder), seed=0)
        try:
            adapter.load(state)
            if self._difference(adapter) <= SAME_LOGITS:
                raise Refused(409, f"The adapter of {name} gives the same logits as the base.")
        except (WorkerFailure, Refused):
            network.drop_adapter(adapter)
            raise
        return adapter

    def _difference(self, adapter: Adapter) -> float:
        """Return the largest absolute difference that the adapter makes to a logit, on one fixed
        prompt."""
        ids = self.renderer.prompt([{"role": "user", "content": "What is 12 + 30? Say hello."}])
        with_adapter = self.base.network.logits(ids, adapter)
        without_adapter = self.base.network.logits(ids, adapter=None)
        return float((with_adapter - without_adapter).abs().max())

    @contextmanager
    def speaking_as(self, name: str) -> Iterator[Sampler]:
        """Context manager that yields a sampler which answers as the model `name`. Other requests
        wait until it ends, since the sampler has one adapter at a time. Raises Refused (404) for an
        unknown name."""
        with self.lock:
            if name != self.base_name and name not in self._loaded:
                raise Refused(404, f"No model {name!r} here; there are {', '.join(self.names())}.")
            self.sampler.load(self._loaded.get(name))  # None for the base
            yield self.sampler

    @torch.no_grad()
    def prompt_logprobs(self, name: str, ids: list[int]) -> list[float]:
        """Return the log-probability in nats of every id but the first under the model `name`.
        Raises Refused (404) for an unknown name."""
        if len(ids) < 2:
            return []  # nothing precedes the only id
        with self.speaking_as(name):  # takes the lock, and refuses an unknown name
            network = self.base.network
            row = Row(ids, loss_mask=[0] + [1] * (len(ids) - 1))  # rates all ids but the first
            batch = network.collate([row]).to(network.device)
            logprobs, _ = network.logprobs(batch, self._loaded.get(name))  # None for the base
        return logprobs.tolist()

    def close(self) -> None:
        """Free the memory that the sampler holds."""
        self.sampler.close()
