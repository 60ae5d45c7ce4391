"""Our own forward pass of dense decoders: Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3, Granite,
OLMo 2 and EXAONE 4. How they differ is read from their configuration and the names of their weights
alone.

Weights are taken over from the transformers model and fused where layers read the same input. The
logits are compared with that model's at load; a model whose logits differ is refused here and runs
on transformers instead (network.py). What makes this forward fast: tokens packed without padding,
the head computed only for tokens that carry loss, one autograd node for a frozen layer with its
adapter, and in float32 the adapter merged into the weights once per step.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from engine.core.hardware import detect
from engine.models.sizing.layers import HEAD_BYTES
from engine.worker.network.adapter import FlatAdapter, LoraSpec, Slot
from engine.worker.network.shape import Multipliers, Shape, is_rotated
from engine.worker.network.weights import (
    Layer,
    LayerWeights,
    Take,
    Weights,
    layer_from,
    opened,
    required,
)
from engine.worker.ops.attention import Attention
from engine.worker.ops.fused_ops import TORCH, Pointwise
from engine.worker.ops.kernels import (
    AddNorm,
    HeadLayout,
    HeadsRope,
    Norm,
    PickRows,
    TokenLogprobs,
)
from engine.worker.ops.matmul import OutputLayer, grain
from engine.worker.ops.packing import Layout, Packed, rounded_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest relative difference from transformers' logits; bfloat16 rounds each layer's output.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: for each pair of a head's components the angle per position, and the factor
    `scale` of cos and sin."""

    inverse_frequencies: tuple[float, ...]
    scale: float


class _RopeTables:
    """Tables (cos, sin) of rotary positions. They are kept, and made anew only for a greater
    length."""

    def __init__(self, rope: Rope, factor: float, context: int, *, like: torch.Tensor) -> None:
        """Make no tables yet.

        Args:
            factor: multiplies cos and sin, beside the scale of `rope`.
            context: how many tokens the model can read at once.
            like: a tensor of the dtype and on the device of the tables.
        """
        self.scale = rope.scale * factor
        # Usually longer than asked for, so that the tables are seldom made anew.
        self.least_length = min(context, 4096)
        self.device, self.dtype = like.device, like.dtype
        self.inverse_frequencies = torch.tensor(rope.inverse_frequencies, device=like.device)
        self.tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables for at least `length` positions, each [positions, 1, head_dim / 2]."""
        if self.tables is None or self.tables[0].shape[0] < length:
            self.tables = self._new_tables(max(length, self.least_length))
        return self.tables

    def _new_tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New tables (cos, sin) for exactly `length` positions, each [length, 1, dim / 2]."""
        positions = torch.arange(length, device=self.device).float()
        angles = torch.outer(positions, self.inverse_frequencies)[:, None]
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return cos.to(self.dtype), sin.to(self.dtype)


class Decoder:
    """Frozen weights and the forward pass over them; see the module.

    Attributes:
        functions: what computes between the matrix products (norms, gates, rotations); torch's own
            functions until others are set.
    """

    def __init__(self, config: Any, take: Take, rope: Rope) -> None:
        """Take the weights over and fuse them layer by layer.

        Args:
            config: configuration of a model that `unsupported` accepts.
            take: returns the weight of a name, in the dtype and on the device to work in; called
                once for each weight.
            rope: the rotary positions that transformers computes for the configuration.

        Raises:
            KeyError: if a weight is missing.
        """
        self.shape = Shape.of(config)
        self.functions: Pointwise = TORCH
        self.eps = float(config.rms_norm_eps)
        self.embedding = required(take, "model.embed_tokens.weight")
        self.head = _head(config, take, self.embedding)
        factors = Multipliers.of(config)
        self.embedding_factor = factors.embedding
        # Granite divides the logits. The head is linear, so its input is divided instead.
        self.norm = required(take, "model.norm.weight") / factors.logits
        self.rotary = rope
        context = self.shape.context
        self._tables = _RopeTables(rope, factor=factors.angles, context=context, like=self.head)
        self._output_layer: OutputLayer | None = None  # made by the method `output_layer`
        self.layers = _layers(config, take, self.shape, factors.residual)
        self._base_weights = Weights(self.layers)

    @classmethod
    def of(cls, model: "PreTrainedModel") -> "Decoder":
        """Make the decoder of a transformers model. The model cannot be used afterwards: weights
        that the decoder fuses are emptied in the model, so that memory never holds both."""
        inner: Any = model.get_decoder()
        rotary = inner.rotary_emb
        rope = Rope(
            tuple(rotary.inv_freq.detach().float().tolist()), float(rotary.attention_scaling)
        )
        parameters = dict(model.named_parameters())

        def take(name: str) -> torch.Tensor | None:
            """The weight called `name`; None if the model has none. The weight of a projection is
            emptied in the model, since it is fused here."""
            parameter = parameters.get(name)
            if parameter is None:
                return None
            weight = parameter.detach()
            if name.endswith("_proj.weight"):
                parameter.data = weight.new_empty(0)
            return weight

        return cls(model.config, take, rope)

    def give_back(self, model: "PreTrainedModel") -> bool:
        """Put the weights that `of` emptied in the model back, as views of the fused ones. Then the
        model works again, and this decoder must not be used any more.

        Returns False, and changes nothing, if the decoder's weights are multiplied by a factor:
        they are not the model's weights any more.
        """
        linears = [linear for layer in self.layers for linear in layer.linears]
        if any(linear.factor != 1 for linear in linears):
            return False
        parameters = dict(model.named_parameters())
        for linear in linears:
            for name, start, stop in linear.slot.projections:
                parameters[f"{name}.weight"].data = linear.weight[start:stop]
        return True

    @classmethod
    def read(
        cls, folder: Path, config: Any, rope: Rope, dtype: torch.dtype, device: torch.device
    ) -> "Decoder":
        """Read the decoder of the model in `folder` straight from its safetensors files. Its
        weights are converted to `dtype`.

        Raises KeyError if a weight has another name than transformers gives it.
        """
        with opened(folder, dtype, device) as take:
            return cls(config, take, rope)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def slots(self) -> list[Slot]:
        """The places where an adapter can join, one for each fused matrix, in order."""
        return [linear.slot for layer in self.layers for linear in layer.linears]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices that an adapter may be merged into."""
        return sum(
            linear.weight.numel() * linear.weight.element_size()
            for layer in self.layers
            for linear in layer.linears
        )

    @property
    def packs_weights(self) -> bool:
        """Whether the machine's memory allows a second copy of the weights, in a faster layout."""
        # Two copies of the weights then take less than half of the memory.
        return 4 * self.weight_bytes < detect().ram_total

    def output_layer(self, vocab: int) -> OutputLayer:
        """The output layer for the ids below `vocab`. It is made at the first call and kept."""
        if self._output_layer is None or len(self._output_layer.weight) != vocab:
            self._output_layer = OutputLayer(self.head[:vocab], pack=self.packs_weights)
        return self._output_layer

    def grain(self, count: int) -> int:
        """The number that `count` tokens should be padded to a multiple of, so that matrix products
        come in few sizes; 1 means no padding."""
        weights = self.weight_bytes // self.head.element_size()
        return grain(count, weights) if self.device.type == "cpu" else 1

    def new_adapter(self, spec: LoraSpec, seed: int) -> FlatAdapter:
        """Make a new adapter of the shape `spec` for this decoder; the seed decides its weights."""
        return FlatAdapter(self.slots, spec, seed, self.device)

    def weights(self, adapter: FlatAdapter | None) -> Weights:
        """The layers with `adapter` on them, as the adapter is now; with None the base's layers
        alone. The layers are made once per adapter and kept in the adapter, so that the policy and
        its sampler share them."""
        if adapter is None:
            return self._base_weights
        if adapter.applied is None:
            # Merge only on a CPU, and only where memory allows a second copy of the weights.
            merge = self.device.type == "cpu" and self.packs_weights
            adapter.applied = Weights(self.layers, adapter, merge=merge)
        return adapter.applied.refresh()

    def rope(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables (cos, sin) of the rotary positions, each [at least `length` positions, 1,
        head_dim / 2] in the weights' dtype."""
        return self._tables.of(length)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of `ids` [tokens] as the first layer reads them, [tokens, hidden]."""
        x = self.embedding.index_select(0, ids)
        return x if self.embedding_factor == 1 else x * self.embedding_factor

    def hidden(
        self,
        batch: Packed,
        weights: Weights,
        rows: torch.Tensor | None = None,
        *,
        checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Compute the hidden states after the last norm, [rows or N, hidden].

        Args:
            batch: N packed tokens.
            weights: base alone, or base and adapter.
            rows: indices of the packed tokens whose hidden states are needed, each once. The last
                layer computes only these after its attention. None: all N.
            checkpointing: recompute each layer in the backward pass, to save memory.
            dropout: probability of dropout on the adapter's input.
        """
        shared = self._prepare_pass(batch, dropout)
        x = self.embed(batch.ids)
        # The output of a layer that has not been added to x yet: the next norm does both at once.
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self.layers):
            is_last = number == len(self.layers) - 1
            step = _LayerStep(shared, layer, weights.of(number), rows if is_last else None)
            if checkpointing and torch.is_grad_enabled():
                x, delta = checkpoint(step, x, delta, use_reentrant=False)  # pyright: ignore
            else:
                x, delta = step(x, delta)
        assert delta is not None
        _, normed = AddNorm.apply(x, delta, self.norm, self.eps, self.functions)
        return normed

    def _prepare_pass(self, batch: Packed, dropout: float) -> "_Pass":
        """Make what all layers need to run over `batch`: its attention plan and the tables of its
        positions. `dropout` is the probability of dropout on the adapter's input."""
        layout = batch.layout
        most_positions = max(layout.prefix_lengths) + max(layout.suffix_lengths, default=0)
        cos, sin = self.rope(most_positions)
        attention = Attention(layout, self.shape.heads, self.shape.kv, self.device, self.dtype)
        return _Pass(self, attention, cos[batch.positions], sin[batch.positions], dropout)

    def logprobs(
        self,
        batch: Packed,
        weights: Weights,
        *,
        vocab: int,
        inverse_temperature: float = 1.0,
        entropies: bool = False,
        checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities and entropies of a batch's trained tokens, ([T], [T])
        float32, in the order of `batch.labels`.

        Args:
            weights: base alone, or base and adapter.
            vocab: ids from this number on have no token and get no probability.
            inverse_temperature: factor of the logits.
            entropies: whether to compute entropies; they are zeros otherwise.
            checkpointing, dropout: see `hidden`.
        """
        # The labels are the ids of the trained tokens; label i is predicted by the packed token
        # predicting[row_of_label[i]].
        predicting, row_of_label = batch.predicting, batch.predicting_of_label
        # On a CPU the hidden states of a few further tokens are computed, as padding: matrix
        # products then come in few sizes, and each size is prepared only once.
        computed = rounded_up(predicting, len(batch.ids), self.grain)
        hidden = self.hidden(batch, weights, computed, checkpointing=checkpointing, dropout=dropout)
        hidden, labels, result_of_label = self._one_label_for_each_row(
            hidden, batch.labels, row_of_label, predicting=len(predicting)
        )
        chunk_rows = _rows_at_once(self.device, vocab)
        logprobs, entropy = TokenLogprobs.apply(
            hidden, self.output_layer(vocab), labels, inverse_temperature, chunk_rows, entropies
        )
        return logprobs[result_of_label], entropy[result_of_label]

    def _one_label_for_each_row(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        row_of_label: torch.Tensor,
        *,
        predicting: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | slice]:
        """Bring hidden rows and labels side by side, one label for each row, as `TokenLogprobs`
        takes them. A row that predicts several labels, such as the last token of a prompt that
        completions share, is repeated.

        Args:
            hidden: the first `predicting` rows predict labels; rows after them are padding.
            row_of_label: for each label the number of the row that predicts it.

        Returns (the rows, a label for each row, an index that picks the labels' rows in their
        order).
        """
        label_count = len(row_of_label)
        if predicting < label_count:  # so some row predicts several labels
            rows, labels_of_rows = self._repeated_by_label(hidden, labels, row_of_label)
            return rows, labels_of_rows, slice(label_count)  # in order; what follows is padding
        return hidden, _labels_by_row(labels, row_of_label, len(hidden)), row_of_label

    def _repeated_by_label(
        self, hidden: torch.Tensor, labels: torch.Tensor, row_of_label: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (for each label the hidden row that predicts it, the labels), both in the order of
        the labels. Both are padded, so that matrix products come in few sizes. `row_of_label` holds
        the number of that row in `hidden`."""
        label_count = len(row_of_label)
        padding = -label_count % self.grain(label_count)  # up to the next multiple
        hidden = hidden.index_select(0, F.pad(row_of_label, (0, padding)))
        return hidden, F.pad(labels, (0, padding))

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The logits of a sequence of `ids` [length], as [length, vocab] float32. All of them are
        in memory at once, so this is for comparisons of short sequences."""
        no_tokens = torch.empty(0, dtype=torch.long, device=ids.device)
        batch = Packed(
            ids,
            positions=torch.arange(len(ids), device=ids.device),
            layout=Layout(prefix_lengths=(len(ids),), suffix_lengths=(), owners=()),
            # No token is trained.
            source=no_tokens,
            labels=no_tokens,
            row=no_tokens,
            predicting=no_tokens,
            predicting_of_label=no_tokens,
        )
        return (self.hidden(batch, weights) @ self.head.t()).float()


@dataclass(frozen=True)
class _Pass:
    """What all layers need for one run over a packed batch.

    Attributes:
        attention: computes the batch's attention.
        cos, sin: [N, 1, head_dim / 2], of the packed tokens' positions.
        dropout: probability of dropout on the adapter's input.
    """

    decoder: Decoder
    attention: Attention
    cos: torch.Tensor
    sin: torch.Tensor
    dropout: float


@dataclass(frozen=True)
class _LayerStep:
    """One decoder layer over packed tokens, as a function of the hidden states alone.

    Attributes:
        linears: the four matrices of the layer, with the adapter if there is one.
        rows: indices of the tokens that are computed after the attention; None for all.
    """

    shared: _Pass
    layer: Layer
    linears: LayerWeights
    rows: torch.Tensor | None

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on the residual stream `x` [N, hidden]. `delta` [N, hidden] is the output
        of the previous layer, which has not been added to `x` yet; None at the first layer.

        Returns (x, delta) for the next layer: for the tokens `self.rows` alone, or for all N if
        that is None.
        """
        layer, dropout = self.layer, self.shared.dropout
        _, o, gate_up, down = self.linears  # the first is applied in `_rotated_heads`
        x, y = self._added_then_normed(x, delta, layer.norm_in)
        attended = self.shared.attention(self._rotated_heads(y))
        if self.rows is not None:
            attended, x = PickRows.apply(attended, self.rows), PickRows.apply(x, self.rows)
        # A model has norms either before attention and MLP or after them; the others are None.
        delta = self._normed(o(attended, dropout), layer.norm_attended)
        x, y = self._added_then_normed(x, delta, layer.norm_mid)
        # The MLP: the projection `down` of silu(gate) * up.
        delta = down.gated(gate_up(y, dropout), dropout, self.shared.decoder.functions)
        return x, self._normed(delta, layer.norm_mlp)

    def _added_then_normed(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x + delta, the norm of that sum with `weight`). If `delta` is None the sum is x;
        if `weight` is None the sum itself stands for its norm."""
        decoder = self.shared.decoder
        if weight is None:
            total = x if delta is None else x + delta
            return total, total
        if delta is None:
            return x, self._normed(x, weight)
        return AddNorm.apply(x, delta, weight, decoder.eps, decoder.functions)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """The RMS norm of x, multiplied by `weight`; x itself if `weight` is None."""
        if weight is None:
            return x
        decoder = self.shared.decoder
        return Norm.apply(x, weight, decoder.eps, decoder.functions)

    def _rotated_heads(self, y: torch.Tensor) -> torch.Tensor:
        """Compute queries, keys and values of the layer's input y [N, hidden], as [N, (heads + 2
        kv_heads) * head_dim]. Queries and keys are normalised, if the model does that, and rotated.
        """
        layer, decoder = self.layer, self.shared.decoder
        qkv, *_ = self.linears
        heads = qkv(y, self.shared.dropout)
        # Some models normalise all heads of a token together (here), others each one (HeadsRope).
        if layer.whole_norms is not None:
            heads = self._wholly_normed(heads, *layer.whole_norms)
        cos, sin = self.shared.cos, self.shared.sin
        if not layer.rotated:  # this layer does not use positions
            cos, sin = no_rotation(cos, sin)
        layout = HeadLayout(decoder.shape.heads, decoder.shape.kv, decoder.eps)
        return HeadsRope.apply(
            heads, layer.q_norm, layer.k_norm, cos, sin, layout, decoder.functions
        )

    def _wholly_normed(
        self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> torch.Tensor:
        """Return qkv [N, (heads + 2 kv_heads) * dim] with queries and keys normalised: all query
        heads of a token as one vector, and all its key heads as another. Values stay as they are.
        """
        keys_width = len(k_norm)
        q, k, v = qkv.split([len(q_norm), keys_width, keys_width], 1)
        q, k = self._normed(q.contiguous(), q_norm), self._normed(k.contiguous(), k_norm)
        return torch.cat([q, k, v], 1)


def _labels_by_row(
    labels: torch.Tensor, row_of_label: torch.Tensor, row_count: int
) -> torch.Tensor:
    """The label of each of `row_count` rows, [row_count]; id 0 for a row without a label. Label i
    belongs to row `row_of_label[i]`, and no row has several."""
    by_row = labels.new_zeros(row_count)
    return by_row.index_copy_(0, row_of_label, labels)


def _head(config: Any, take: Take, embedding: torch.Tensor) -> torch.Tensor:
    """The weight of the output layer, [vocab, hidden]. It is the embedding's weight if the model
    ties the two, or has no output weight in its files."""
    is_tied = getattr(config, "tie_word_embeddings", False)
    head = None if is_tied else take("lm_head.weight")
    return embedding if head is None else head


def _layers(config: Any, take: Take, shape: Shape, residual: float) -> list[Layer]:
    """Build the layers of a model from the weights that `take` gives. `residual` multiplies the
    outputs of attention and MLP."""
    return [
        layer_from(take, number, shape.head_dim, residual, rotated=is_rotated(config, number))
        for number in range(shape.layers)
    ]


def _rows_at_once(device: torch.device, vocab: int) -> int:
    """The number of tokens whose logits are computed at once: so many that their float32 logits
    take HEAD_BYTES, but at least 128."""
    logit_bytes = HEAD_BYTES.get(device.type, 2**24)  # 2**24: on any other device
    return max(128, logit_bytes // (4 * vocab))  # a float32 has 4 bytes


def no_rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables in the shape of `cos` and `sin` whose rotation leaves every vector as it is."""
    return torch.ones_like(cos), torch.zeros_like(sin)
