"""How many rows a sampler and how many tokens a microbatch may have on a device, and the bytes that
they take.

On a CPU both are fixed shares of the machine's memory for the model, because a seeded run must stay
the same. On a GPU they are as many as fit into FILLED of the memory beside weights, adapters and
overhead, but at least a fixed minimum. A run is refused only if this minimum does not fit.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from engine.models.model_files import ModelFacts
from engine.models.sizing import layers, servers
from engine.models.sizing.layers import LoadedModel
from engine.models.sizing.servers import ServerPlan

MOST_ROWS = {"cpu": 256, "cuda": 512}  # completions that our own samplers sample at once
LEAST_ROWS = {"cpu": 8, "cuda": 1}  # sampled at once even if memory is short
MICRO_CEILING = {"cpu": 1024, "cuda": 65536}  # the most tokens of a microbatch
MICRO_FLOOR = 512.0  # the least tokens that a microbatch may hold
# The share of a GPU's memory that is filled, with rows and microbatches; above 0.8 it is tight.
FILLED = 0.78
_CPU_SHARE = 0.25  # of a CPU's memory, for keys and values, and as much for one microbatch
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
        adapter_bytes: of all adapters; None for the one of `loaded`, with its optimizer.
        other_weights: bytes of the weights of other models, such as a teacher's.
        wants_server: whether the run asks for a vLLM server that samples.
        ram: bytes of the machine's memory; 0 if that is not known.
        own_forward: whether our own forward computes the model; None if the model's family decides.
        sampling_gpus: number of devices of the same size that only sample; 0 if the device that
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
        """The sizes of the model."""
        return self.loaded.model

    @property
    def adapters(self) -> float:
        """Bytes of all adapters: `adapter_bytes`, or those of the adapter of `loaded`, with its
        optimizer if it is trained."""
        if self.adapter_bytes is not None:
            return self.adapter_bytes
        if self.trains:
            return layers.trained_adapter_bytes(self.loaded, self.kind)
        return self.loaded.adapter * 4  # float32

    @cached_property
    def server(self) -> ServerPlan:
        """The vLLM server that would sample for the run: on GPUs of its own if there are any, else
        beside training. Its `why_not` says why it cannot run."""
        if self.sampling_gpus:
            return servers.server_on_own_gpus(
                self.loaded, self.memory, self.sampling_gpus, self.longest
            )
        held_bytes = servers.trainer_bytes(self.loaded, self.adapters, self.other_weights)
        plan = servers.server_beside_training(
            self.loaded, self.memory, held_bytes, self.longest, self.ram
        )
        needed_bytes = self._least_training_bytes() + servers.ASLEEP_BYTES
        if plan.why_not or not self.trains or needed_bytes <= layers.FITS * self.memory:
            return plan
        why_not = (
            f"training with vLLM asleep takes {needed_bytes / 1e9:.1f} GB at least, which do not "
            f"fit into {self.memory / 1e9:.1f} GB"
        )
        return replace(plan, why_not=why_not)

    def _least_training_bytes(self) -> float:
        """Estimate the bytes that training takes with the smallest microbatches, which must hold
        the longest sequence: weights, adapters, one pass of a microbatch, and overhead."""
        tokens = max(MICRO_FLOOR, self.longest)
        pass_bytes = tokens * self._token_bytes
        if self.is_own:
            pass_bytes += layers.trained_logit_bytes(self.model, self.kind, tokens)
        held_bytes = self.loaded.weights + self.adapters + self.other_weights + pass_bytes
        return held_bytes + layers.overhead_bytes(self.kind, held_bytes)

    @property
    def has_server(self) -> bool:
        """Whether a vLLM server samples: the run asks for one, is on a GPU, and has room for it."""
        return self.wants_server and self.kind == "cuda" and not self.server.why_not

    @property
    def sampler_rows(self) -> int:
        """The most completions that are sampled at once."""
        if self.kind == "cpu":
            return self._cpu_rows()
        if self.has_server:
            return self.server.rows
        row_bytes = sum(layers.sampled_row_bytes(self.loaded, self.kind, self.longest))
        rows = self._free_bytes(asleep_bytes=0.0) / row_bytes
        return int(max(LEAST_ROWS["cuda"], min(MOST_ROWS["cuda"], rows)))

    def _cpu_rows(self) -> int:
        """Count the rows that a CPU samples at once: so many that their keys and values fit into a
        share of its memory, if each has `_COMMON_LENGTH` tokens (or the model's context, if that is
        shorter)."""
        length = min(self.model.max_positions, _COMMON_LENGTH)
        row_bytes = max(1, self.loaded.cache_token_bytes * length)
        rows = min(MOST_ROWS["cpu"], _CPU_SHARE * self.memory / row_bytes)
        return int(max(LEAST_ROWS["cpu"], rows))

    @property
    def microbatch_tokens(self) -> float:
        """The most tokens, padding included, that go through the model at once in training. A
        longer row gets a microbatch of its own."""
        if self.kind == "cpu":
            room = _CPU_SHARE * self.memory
        else:
            logits = layers.trained_logit_bytes(self.model, self.kind, MICRO_CEILING["cuda"])
            room = self._free_bytes(asleep_bytes=self.asleep_bytes) - logits
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
        """Bytes that a sleeping vLLM server takes of the GPU that trains; 0 if there is none on
        it."""
        if not self.has_server or self.sampling_gpus:
            return 0.0
        return servers.ASLEEP_BYTES

    def _free_bytes(self, asleep_bytes: float) -> float:
        """Compute the bytes of a GPU that rows or a microbatch may take: what weights, adapters,
        overhead and a sleeping server (`asleep_bytes` bytes) leave of the memory to be filled.

        The overhead of a process is a fixed part and a share of all bytes it uses; so the share of
        the rows or the microbatch themselves is taken off too.
        """
        fixed_overhead, overhead_share = layers.OVERHEAD["cuda"]
        held_bytes = self.loaded.weights + self.adapters + self.other_weights
        usable_bytes = FILLED * self.memory - fixed_overhead - asleep_bytes
        return usable_bytes / (1 + overhead_share) - held_bytes
