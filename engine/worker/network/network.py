"""A frozen base model as training sees it: rows in, log-probabilities out, with any adapter on it.

`DecoderNetwork` is our own forward (decoder.py) for the architectures it knows. Every other model
runs as `HubNetwork` (hub_network.py): transformers with PEFT's modules, slower, with the same
numbers. The run's manifest says which of the two a model got, and why.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.worker.core.batch import Batch, Row
from engine.worker.network.adapter import Adapter, FlatAdapter, LoraSpec
from engine.worker.network.decode import DecoderSampler
from engine.worker.network.decoder import Decoder
from engine.worker.network.sampler import Sampler, SamplerNeeds
from engine.worker.network.shape import Shape
from engine.worker.network.weights import Weights
from engine.worker.ops.fused_ops import AS_WRITTEN, Choice
from engine.worker.ops.packing import Packed, pack

PackedOrPadded = Packed | Batch

# By how much the limit of evenly filled microbatches is raised while they are too many.
LIMIT_GROWTH = 1.02


class Network(Protocol):
    """What both networks (our own forward, and transformers') offer.

    Attributes:
        forward: names the implementation; why: what ruled out our own, "" if nothing did.
        kernels: names the functions between the matrix products; kernels_why: what ruled out others
            (fused_ops.py).
        capture_why: why the sampler computes each step by itself although it might capture one, ""
            if it does not or cannot; known once a sampler was made.
        vocab: how many ids have a token.
        shape: sizes of the model.
    """

    forward: str
    why: str
    kernels: str
    kernels_why: str
    capture_why: str
    vocab: int
    shape: Shape

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The number format that the model computes in."""
        ...

    def new_adapter(self, spec: LoraSpec, seed: int) -> Adapter:
        """Make a new LoRA adapter of the shape `spec` (rank, alpha, targets): its factors A are
        drawn as PEFT draws them for the seed, its factors B are zero."""
        ...

    def drop_adapter(self, adapter: Adapter) -> None:
        """Release the memory that this network holds for `adapter`, which the caller no longer
        uses."""
        ...

    def collate(self, rows: Sequence[Row]) -> PackedOrPadded:
        """Make one microbatch of `rows`, in the form that `logprobs` reads."""
        ...

    def split(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        """Divide `rows` into microbatches of at most `budget` tokens, as this network counts
        tokens. Returns for each microbatch the indices of its rows.

        A row above the budget gets a microbatch of its own. Every index occurs once.
        """
        ...

    def logprobs(
        self,
        batch: PackedOrPadded,
        adapter: Adapter | None,
        *,
        inverse_temperature: float = 1.0,
        entropies: bool = False,
        checkpointing: bool = False,
        training: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities and entropies of the trained tokens, two tensors [T]
        float32. The log-probabilities carry gradients to the adapter.

        Args:
            batch: made by `collate`.
            adapter: None runs the base alone.
            inverse_temperature: factor of the logits.
            entropies: whether they are needed; otherwise they may be zeros.
            checkpointing: recompute activations in the backward pass, to save memory.
            training: switches dropout on.
        """
        ...

    def logits(self, ids: Sequence[int], adapter: Adapter | None) -> torch.Tensor:
        """Compute the logits of one sequence, [ids, vocab] float32, without gradient. With
        `adapter` None they are those of the base."""
        ...

    def sampler(self, needs: SamplerNeeds) -> Sampler:
        """Make a sampler on this network. `needs` holds what it has to know beside the weights,
        such as the ids that end a completion."""
        ...


class DecoderNetwork:
    """Our own forward.

    Args:
        decoder: the base model.
        vocab: how many ids have a token.
        kernel_choice: which functions `decoder` computes with from now on, and why.
    """

    forward = "own"
    why = capture_why = ""

    def __init__(self, decoder: Decoder, vocab: int, kernel_choice: Choice = AS_WRITTEN) -> None:
        """Keep the decoder and set its functions between the matrix products (norms, rotations,
        gates) to those of `kernel_choice`. `vocab`: how many ids have a token."""
        self.decoder = decoder
        self.decoder.functions = kernel_choice.functions
        self.kernels = kernel_choice.functions.name
        self.kernels_why = kernel_choice.why
        self.vocab = vocab
        self.shape = decoder.shape

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format that the model computes in."""
        return self.decoder.dtype

    def new_adapter(self, spec: LoraSpec, seed: int) -> FlatAdapter:
        """Make a new LoRA adapter of the shape `spec` (rank, alpha, targets): its factors A are
        drawn by the seed, its factors B are zero."""
        return self.decoder.new_adapter(spec, seed)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free the layers with this adapter on them, which `Decoder.weights` has kept in the
        adapter. They are made again if the adapter is used again."""
        _require_flat(adapter).applied = None

    def collate(self, rows: Sequence[Row]) -> Packed:
        """Pack the rows into one batch: their token ids one after the other, without padding; a
        prompt that rows share stands there once."""
        return pack(rows, self.decoder.padding_multiple)

    def split(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        """Divide `rows` into microbatches of at most `budget` tokens; a larger row gets one of its
        own. Returns for each microbatch the indices of its rows.

        Rows that share a prompt stay together as far as they fit, and their prompt counts once per
        microbatch. There are as few microbatches as the budget allows, and all are of about the
        same size, because the largest one decides how much memory a step takes.
        """
        order = sorted(range(len(rows)), key=lambda index: _sort_key(rows[index], index))
        groups, sizes = _fill_in_order(rows, order, budget)
        # Now make them even: find the lowest limit that needs no more microbatches than these.
        # Begin at an equal share, and raise the limit by 2 % at a time.
        limit = math.ceil(sum(sizes) / len(groups)) if groups else budget
        while limit < budget:
            even_groups, _ = _fill_in_order(rows, order, limit)
            if len(even_groups) == len(groups):
                return even_groups
            limit = math.ceil(limit * LIMIT_GROWTH)
        return groups

    def logprobs(
        self,
        batch: PackedOrPadded,
        adapter: Adapter | None,
        *,
        inverse_temperature: float = 1.0,
        entropies: bool = False,
        checkpointing: bool = False,
        training: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities and entropies of the batch's T trained tokens, two tensors
        [T] float32; only log-probabilities carry gradients.

        Args:
            batch: made by `collate`.
            adapter: None runs the base alone.
            inverse_temperature: factor of the logits.
            entropies: whether they are needed; otherwise they are zeros.
            checkpointing: recompute each layer in the backward pass, to save memory.
            training: switches the adapter's dropout on.
        """
        assert isinstance(batch, Packed)  # as `collate` makes it
        dropout = 0.0
        if adapter is not None and training:
            dropout = adapter.spec.dropout
        return self.decoder.logprobs(
            batch.to(self.device),
            self._weights(adapter),
            vocab=self.vocab,
            inverse_temperature=inverse_temperature,
            entropies=entropies,
            checkpointing=checkpointing,
            dropout=dropout,
        )

    def logits(self, ids: Sequence[int], adapter: Adapter | None) -> torch.Tensor:
        """Compute the logits of one sequence, [ids, vocab] float32, without gradient. With
        `adapter` None they are those of the base."""
        return self.decoder.logits(torch.tensor(ids, device=self.device), self._weights(adapter))

    def sampler(self, needs: SamplerNeeds) -> Sampler:
        """Make our own sampler on this decoder. `needs` holds what it has to know beside the
        weights, such as the ids that end a completion."""
        return DecoderSampler(self.decoder, needs, self.vocab)

    def _weights(self, adapter: Adapter | None) -> Weights:
        """Return the decoder's layers with `adapter` on them; with None those of the base
        alone."""
        return self.decoder.weights(_require_flat(adapter) if adapter is not None else None)


def _require_flat(adapter: Adapter) -> FlatAdapter:
    """Return `adapter` itself if it was made for our own forward. Raises TypeError for one that a
    HubNetwork made."""
    if not isinstance(adapter, FlatAdapter):
        raise TypeError(f"this adapter belongs to another forward: {type(adapter).__name__}")
    return adapter


def _fill_in_order(
    rows: Sequence[Row], order: Sequence[int], limit: int
) -> tuple[list[list[int]], list[int]]:
    """Fill microbatches of at most `limit` tokens one after the other, taking the rows in the order
    of the indices in `order`. A prompt that rows share counts once per microbatch.

    Returns (the row indices of each microbatch, the number of tokens of each microbatch).
    """
    microbatches: list[list[int]] = []
    sizes: list[int] = []
    last_prompt: list[int] = []
    for index in order:
        row = rows[index]
        prompt = list(row.ids[: row.prefix_len])  # empty if the row shares none
        tokens_alone = len(row.ids) - 1  # the last token predicts nothing
        # The microbatch holds the prompt already if the row before has the same.
        added = tokens_alone - (len(prompt) if prompt == last_prompt else 0)
        if microbatches and sizes[-1] + added <= limit:
            microbatches[-1].append(index)
            sizes[-1] += added
        else:
            microbatches.append([index])
            sizes.append(tokens_alone)
        last_prompt = prompt
    return microbatches, sizes


def _sort_key(row: Row, index: int) -> tuple[int, tuple[int, ...], int]:
    """Make the key that sorts a row: long prompts come first, and rows that share a prompt stand
    next to each other, in the order of `index`. A row without a shared prompt counts as a prompt of
    its whole length."""
    prompt = tuple(row.ids[: row.prefix_len])
    prompt_tokens = row.prefix_len or len(row.ids)
    return -prompt_tokens, prompt, index
