"""Rows of a sampler and tokens of a microbatch on a device, and the bytes that they take.

On a CPU both follow from the model and the machine's memory by fixed shares, as a seeded run must
stay the same. On a GPU they follow from what weights, adapters and overhead leave of the memory: as
many as fit into FILLED of it, and at least the least. Only a run whose least does not fit is
refused.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from engine.models.model_files import ModelFacts
from engine.sizing import layers, servers
from engine.sizing.layers import LoadedModel
from engine.sizing.servers import ServerPlan

MOST_ROWS = {"cpu": 256, "cuda": 512}  # completions that our own samplers sample at once
LEAST_ROWS = {"cpu": 8, "cuda": 1}  # even where memory is short
MICRO_CEILING = {"cpu": 1024, "cuda": 65536}  # tokens of a microbatch at most
MICRO_FLOOR = 512.0  # tokens of a microbatch at least
FILLED = 0.78  # of a GPU's memory that rows and microbatches may fill; above 0.8 memory is tight
_CPU_SHARE = 0.25  # of the memory of a CPU: for keys and values, and for one microbatch
_COMMON_LENGTH = 4096  # tokens that completions commonly stay below, whatever the context


@dataclass(frozen=True)
class Job:
    """What has to fit into a device.

    Attributes:
        kind: of the device, cpu or cuda.
        memory: bytes of the device that may be used.
        longest: tokens that a sampled sequence may have, prompt included.
        trains: whether there is training beside the sampling.
        recomputes: whether activations are computed again in the backward pass.
        adapter_bytes: of all adapters; None for that of `loaded` with its optimizer.
        other_weights: bytes of the weights of other models, such as a teacher's.
        wants_server: whether a vLLM server samples.
        ram: bytes of the machine's memory; 0 if that is not known.
        own_forward: whether our own forward computes the model; None: as its family says.
        sampling_gpus: devices of the same size that do nothing but sample; 0 where the device that
            trains samples too.
    """

    loaded: LoadedModel
    kind: str
    memory: int
    longest: int
    trains: bool = True
    recomputes: bool = False
    adapter_bytes: float | None = None
    other_weights: float = 0.0
    wants_server: bool = False
    ram: int = 0
    own_forward: bool | None = None
    sampling_gpus: int = 0

    @property
    def is_own(self) -> bool:
        """Whether our own forward computes the model."""
        return self.loaded.own_forward if self.own_forward is None else self.own_forward

    @property
    def model(self) -> ModelFacts:
        return self.loaded.model

    @property
    def adapters(self) -> float:
        """Bytes of all adapters."""
        if self.adapter_bytes is not None:
            return self.adapter_bytes
        if self.trains:
            return layers.trained_adapter_bytes(self.loaded, self.kind)
        return self.loaded.adapter * 4  # float32

    @cached_property
    def server(self) -> ServerPlan:
        """The vLLM server that would sample for the run."""
        if self.sampling_gpus:
            return servers.alone(self.loaded, self.memory, self.sampling_gpus, self.longest)
        held = servers.trainer_bytes(self.loaded, self.adapters, self.other_weights)
        plan = servers.beside_training(self.loaded, self.memory, held, self.longest, self.ram)
        needed = self._least_training_bytes() + servers.ASLEEP_BYTES
        if plan.why_not or not self.trains or needed <= layers.FITS * self.memory:
            return plan
        why_not = (
            f"training with vLLM asleep takes {needed / 1e9:.1f} GB at least, which do not fit "
            f"into {self.memory / 1e9:.1f} GB"
        )
        return replace(plan, why_not=why_not)

    def _least_training_bytes(self) -> float:
        """Bytes of training with the smallest microbatches, which hold the longest sequence."""
        tokens = max(MICRO_FLOOR, self.longest)
        passed = tokens * self._token_bytes
        if self.is_own:
            passed += layers.trained_logit_bytes(self.model, self.kind, tokens)
        held = self.loaded.weights + self.adapters + self.other_weights + passed
        return held + layers.overhead_bytes(self.kind, held)

    @property
    def has_server(self) -> bool:
        """Whether a vLLM server samples: it is wanted, on a GPU, and has room there."""
        return self.wants_server and self.kind == "cuda" and not self.server.why_not

    @property
    def sampler_rows(self) -> int:
        """How many completions are sampled at once, if so many are asked for."""
        if self.kind == "cpu":
            return self._cpu_rows()
        if self.has_server:
            return self.server.rows
        row_bytes = sum(layers.sampled_row_bytes(self.loaded, self.kind, self.longest))
        rows = self._room(asleep=0.0) / row_bytes
        return int(max(LEAST_ROWS["cuda"], min(MOST_ROWS["cuda"], rows)))

    def _cpu_rows(self) -> int:
        """The rows of a CPU: as many as have room for their keys and values in a share of its
        memory, if each has `_COMMON_LENGTH` tokens (or the model's context, if that is shorter)."""
        length = min(self.model.max_positions, _COMMON_LENGTH)
        row_bytes = max(1, self.loaded.cache_token_bytes * length)
        rows = min(MOST_ROWS["cpu"], _CPU_SHARE * self.memory / row_bytes)
        return int(max(LEAST_ROWS["cpu"], rows))

    @property
    def microbatch_tokens(self) -> float:
        """The most tokens, padding included, that go through the model at once in training; a
        longer row goes alone."""
        if self.kind == "cpu":
            room = _CPU_SHARE * self.memory
        else:
            logits = layers.trained_logit_bytes(self.model, self.kind, MICRO_CEILING["cuda"])
            room = self._room(asleep=self.asleep_bytes) - logits
        return max(MICRO_FLOOR, min(MICRO_CEILING[self.kind], room / self._token_bytes))

    @property
    def _token_bytes(self) -> float:
        """Bytes of each token of a microbatch. On a CPU those of transformers' forward are taken
        for every model."""
        if self.kind == "cpu" or not self.is_own:
            return layers.foreign_token_bytes(self.model, recomputes=self.recomputes)
        return layers.trained_token_bytes(
            self.loaded, self.kind, recomputes=self.recomputes, length=self.longest
        )

    @property
    def asleep_bytes(self) -> float:
        """Bytes that a sleeping server holds of the GPU that trains."""
        return servers.ASLEEP_BYTES if self.has_server and not self.sampling_gpus else 0.0

    def _room(self, asleep: float) -> float:
        """Bytes of a GPU that weights, adapters, overhead and a sleeping server leave free; what is
        put there brings overhead of its own."""
        fixed, share = layers.OVERHEAD["cuda"]
        held = self.loaded.weights + self.adapters + self.other_weights
        return (FILLED * self.memory - fixed - asleep) / (1 + share) - held
