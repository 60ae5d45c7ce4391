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
    Linear,
    ReadWeight,
    Weights,
    layer_from,
    open_weights,
    required_weight,
)
from engine.worker.ops.attention import Attention
from engine.worker.ops.fused_ops import TORCH, LayerFunctions
from engine.worker.ops.kernels import (
    AddNorm,
    HeadLayout,
    HeadsRope,
    Norm,
    PickRows,
    TokenLogprobs,
)
from engine.worker.ops.matmul import OutputLayer, padding_multiple
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
        """Make no tables yet; `for_length` makes them.

        Args:
            rope: the angle per position of each pair of a head's components, and a factor of the
                tables.
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

    def for_length(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables (cos, sin) for at least `length` positions, each [positions, 1,
        head_dim / 2]. New ones are made only if those at hand are too short."""
        if self.tables is None or self.tables[0].shape[0] < length:
            self.tables = self._new_tables(max(length, self.least_length))
        return self.tables

    def _new_tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the tables (cos, sin) for exactly `length` positions, each [length, 1, head_dim /
        2]. The angles are computed in float32, whatever the tables' dtype is."""
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

    def __init__(self, config: Any, read_weight: ReadWeight, rope: Rope) -> None:
        """Take the weights over and fuse them layer by layer.

        Args:
            config: configuration of a model that `unsupported` accepts.
            read_weight: returns the weight of a name, in the dtype and on the device to work in;
                None if the model has no such weight. Called once for each weight.
            rope: the rotary positions that transformers computes for the configuration.

        Raises:
            KeyError: if a weight is missing.
        """
        self.shape = Shape.from_config(config)
        self.functions: LayerFunctions = TORCH
        self.eps = float(config.rms_norm_eps)
        self.embedding = required_weight(read_weight, "model.embed_tokens.weight")
        self.head = _head(config, read_weight, self.embedding)
        factors = Multipliers.from_config(config)
        self.embedding_factor = factors.embedding
        # Granite divides the logits. The head is linear, so its input is divided instead.
        self.norm = required_weight(read_weight, "model.norm.weight") / factors.logits
        self.rotary = rope
        context = self.shape.context
        self._tables = _RopeTables(rope, factor=factors.angles, context=context, like=self.head)
        self._output_layer: OutputLayer | None = None  # made by the method `output_layer`
        self.layers = _layers(config, read_weight, self.shape, factors.residual)
        self._base_weights = Weights(self.layers)

    @classmethod
    def from_transformers(cls, model: "PreTrainedModel") -> "Decoder":
        """Make the decoder of a transformers model. The model cannot be used afterwards: weights
        that the decoder fuses are emptied in the model, so that memory never holds both."""
        inner: Any = model.get_decoder()  # the model without its output layer
        rotary = inner.rotary_emb
        rope = Rope(
            tuple(rotary.inv_freq.detach().float().tolist()), float(rotary.attention_scaling)
        )
        parameters = dict(model.named_parameters())

        def read_weight(name: str) -> torch.Tensor | None:
            """The weight called `name`; None if the model has none. The weight of a projection is
            emptied in the model, since it is fused here."""
            parameter = parameters.get(name)
            if parameter is None:
                return None
            weight = parameter.detach()
            if name.endswith("_proj.weight"):
                parameter.data = weight.new_empty(0)
            return weight

        return cls(model.config, read_weight, rope)

    def return_weights(self, model: "PreTrainedModel") -> bool:
        """Put the weights that `from_transformers` emptied in the model back, as views of the fused
        ones. Then the model works again, and this decoder must not be used any more.

        Returns whether that was done. If the decoder's weights are multiplied by a factor, they are
        not the model's weights any more: nothing is changed, and the result is False.
        """
        if any(linear.factor != 1 for linear in self.linears):
            return False
        parameters = dict(model.named_parameters())
        for linear in self.linears:
            for name, start, stop in linear.slot.projections:
                parameters[f"{name}.weight"].data = linear.weight[start:stop]
        return True

    @classmethod
    def read(
        cls, folder: Path, config: Any, rope: Rope, dtype: torch.dtype, device: torch.device
    ) -> "Decoder":
        """Read the decoder of the model in `folder` straight from its safetensors files. Its
        weights are converted to `dtype` and put on `device`; `config` is the model's configuration,
        `rope` holds the rotary positions that transformers computes for it.

        Raises KeyError if a weight has another name than transformers gives it.
        """
        with open_weights(folder, dtype, device) as read_weight:
            return cls(config, read_weight, rope)

    @property
    def device(self) -> torch.device:
        """The device that all weights are on."""
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of all weights."""
        return self.head.dtype

    @property
    def linears(self) -> list[Linear]:
        """The four fused matrices of every layer, layer by layer. An adapter can join each."""
        return [linear for layer in self.layers for linear in layer.linears]

    @property
    def slots(self) -> list[Slot]:
        """The places where an adapter can join, one for each of `linears`, in that order."""
        return [linear.slot for linear in self.linears]

    @property
    def weight_bytes(self) -> int:
        """The bytes of all layers' matrices, those that an adapter may be merged into; embedding
        and output layer do not count."""
        weights = [linear.weight for linear in self.linears]
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def packs_weights(self) -> bool:
        """Whether the machine's memory allows a second copy of the weights, in a faster layout."""
        # Two copies of the weights then take less than half of the memory.
        return 4 * self.weight_bytes < detect().ram_total

    def output_layer(self, vocab: int) -> OutputLayer:
        """Return the output layer that gives logits for the ids below `vocab` alone. It is made at
        the first call, kept, and made again only for another `vocab`."""
        if self._output_layer is None or len(self._output_layer.weight) != vocab:
            self._output_layer = OutputLayer(self.head[:vocab], pack=self.packs_weights)
        return self._output_layer

    def padding_multiple(self, count: int) -> int:
        """Return the number that `count` tokens should be padded to a multiple of. With padding,
        matrix products come in few sizes, each of which a CPU's library prepares only once. On a
        GPU the result is 1: no padding."""
        weight_count = self.weight_bytes // self.head.element_size()
        return padding_multiple(count, weight_count) if self.device.type == "cpu" else 1

    def new_adapter(self, spec: LoraSpec, seed: int) -> FlatAdapter:
        """Make a new LoRA adapter of the shape `spec` (rank, alpha, targets) for this decoder. The
        seed decides its factors A; its factors B are zero, so that it changes nothing yet."""
        return FlatAdapter(self.slots, spec, seed, self.device)

    def weights(self, adapter: FlatAdapter | None) -> Weights:
        """Return the layers with `adapter` on them, as the adapter is now; with None the base's
        layers alone. They are made once per adapter and kept in the adapter (`applied`), so that
        the policy and its sampler share them."""
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
        return self._tables.for_length(length)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings of `ids` [tokens], multiplied by the model's constant factor if it
        has one. Returns what the first layer reads, [tokens, hidden]."""
        x = self.embedding.index_select(0, ids)
        return x if self.embedding_factor == 1 else x * self.embedding_factor

    def hidden(
        self,
        batch: Packed,
        weights: Weights,
        needed: torch.Tensor | None = None,
        *,
        checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Compute the hidden states after the last norm, [needed tokens, hidden].

        Args:
            batch: N packed tokens.
            weights: base alone, or base and adapter.
            needed: indices of the packed tokens whose hidden states are needed, each once. The last
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
            linears = weights.layer(number)
            step = _LayerStep(shared, layer, linears, needed if is_last else None)
            if checkpointing and torch.is_grad_enabled():
                x, delta = checkpoint(step, x, delta, use_reentrant=False)  # pyright: ignore
            else:
                x, delta = step(x, delta)
        assert delta is not None
        _, normed = AddNorm.apply(x, delta, self.norm, self.eps, self.functions)
        return normed

    def _prepare_pass(self, batch: Packed, dropout: float) -> "_Pass":
        """Make what all layers need to run over `batch`: its attention plan, and cos and sin of the
        rotary positions of its tokens. `dropout` is the probability of dropout on the adapter's
        input."""
        layout = batch.layout
        # No row is longer than the longest prompt (prefix) and the longest completion (suffix).
        most_positions = max(layout.prefix_lengths) + max(layout.suffix_lengths, default=0)
        cos, sin = self.rope(most_positions)
        attention = Attention(
            layout, self.shape.heads, self.shape.kv_heads, self.device, self.dtype
        )
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
            checkpointing: recompute each layer in the backward pass, to save memory.
            dropout: probability of dropout on the adapter's input.
        """
        # The labels are the ids of the trained tokens; label i is predicted by the packed token
        # predicting[row_of_label[i]].
        predicting, row_of_label = batch.predicting, batch.predicting_of_label
        # On a CPU the hidden states of a few further tokens are computed, as padding: matrix
        # products then come in few sizes, and each size is prepared only once.
        computed = rounded_up(predicting, len(batch.ids), self.padding_multiple)
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
        """Bring hidden states and labels side by side, one label for each row of hidden states, as
        `TokenLogprobs` takes them. A row that predicts several labels, such as the last token of a
        prompt that completions share, is repeated.

        Args:
            hidden: [rows, hidden]; the first `predicting` rows predict labels, the rest is padding.
            labels: [labels] int64, the ids to predict.
            row_of_label: [labels] int64, for each label the number of the row that predicts it.

        Returns (the rows; an id for each row, 0 where nothing is to be predicted; an index that
        picks from results by row those of the labels, in the order of `labels`).
        """
        label_count = len(row_of_label)
        if predicting < label_count:  # so some row predicts several labels
            rows, labels_of_rows = self._repeated_by_label(hidden, labels, row_of_label)
            return rows, labels_of_rows, slice(label_count)  # in order; what follows is padding
        return hidden, _labels_by_row(labels, row_of_label, len(hidden)), row_of_label

    def _repeated_by_label(
        self, hidden: torch.Tensor, labels: torch.Tensor, row_of_label: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the row of hidden states that predicts each label, the labels), both in the order
        of the labels. Both are padded at the end, so that matrix products come in few sizes.
        `row_of_label` [labels] holds for each label the number of its row in `hidden`."""
        label_count = len(row_of_label)
        padding = -label_count % self.padding_multiple(label_count)  # up to the next multiple
        hidden = hidden.index_select(0, F.pad(row_of_label, (0, padding)))
        return hidden, F.pad(labels, (0, padding))

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Compute the logits of one sequence of `ids` [length], as [length, vocab] float32 without
        gradient, with `weights` (base alone, or base and adapter). All of them are in memory at
        once, so this is for comparisons of short sequences."""
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
        needed: indices of the tokens that are computed after the attention; None for all.
    """

    shared: _Pass
    layer: Layer
    linears: LayerWeights
    needed: torch.Tensor | None

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on the residual stream `x` [N, hidden]. `delta` [N, hidden] is the output
        of the previous layer, which has not been added to `x` yet; None at the first layer. It is
        added here, because the sum and its norm are computed by one kernel.

        Returns (x, delta) for the next layer, which adds them: for the tokens `self.needed` alone,
        or for all N if that is None.

        A model has norms either before attention and MLP or after them. The others are None; where
        the norm is None, the helpers pass their input on as it is.
        """
        layer, dropout = self.layer, self.shared.dropout
        # The first of the four, queries, keys and values, is applied in `_rotated_heads`.
        _qkv, attention_output, gate_up, down = self.linears
        x, normed_x = self._added_then_normed(x, delta, layer.norm_in)
        attended = self.shared.attention(self._rotated_heads(normed_x))
        if self.needed is not None:
            attended, x = PickRows.apply(attended, self.needed), PickRows.apply(x, self.needed)
        delta = self._normed(attention_output(attended, dropout), layer.norm_attended)
        x, normed_x = self._added_then_normed(x, delta, layer.norm_mid)
        # The MLP: the projection `down` of silu(gate) * up.
        gated_input = gate_up(normed_x, dropout)
        delta = down.apply_gated(gated_input, dropout, self.shared.decoder.functions)
        return x, self._normed(delta, layer.norm_mlp)

    def _added_then_normed(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x + delta, the RMS norm of that sum multiplied by `weight`), both [N, hidden]. If
        `delta` is None the sum is x; if `weight` is None the sum itself stands for its norm."""
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
        kv_heads) * head_dim]. Queries and keys are normalised, if the model does that, and rotated
        by their positions, if this layer does that."""
        layer, decoder = self.layer, self.shared.decoder
        qkv, *_ = self.linears
        heads = qkv(y, self.shared.dropout)
        # Some models normalise all heads of a token together (here), others each one (HeadsRope).
        if layer.whole_norms is not None:
            heads = self._wholly_normed(heads, *layer.whole_norms)
        cos, sin = self.shared.cos, self.shared.sin
        if not layer.rotated:  # this layer does not use positions
            cos, sin = no_rotation(cos, sin)
        layout = HeadLayout(decoder.shape.heads, decoder.shape.kv_heads, decoder.eps)
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
    """Return the label of each of `row_count` rows, [row_count]; 0 for a row without a label.
    `labels[i]` belongs to row `row_of_label[i]`, and no row has several labels."""
    by_row = labels.new_zeros(row_count)
    return by_row.index_copy_(0, row_of_label, labels)


def _head(config: Any, read_weight: ReadWeight, embedding: torch.Tensor) -> torch.Tensor:
    """Read the weight of the output layer, [vocab, hidden]. It is the embedding's weight
    `embedding` if the configuration ties the two, or if the model has no output weight."""
    is_tied = getattr(config, "tie_word_embeddings", False)
    head = None if is_tied else read_weight("lm_head.weight")
    return embedding if head is None else head


def _layers(config: Any, read_weight: ReadWeight, shape: Shape, residual: float) -> list[Layer]:
    """Build the layers of a model from the weights that `read_weight` gives by name. `residual`
    multiplies the outputs of attention and MLP."""
    return [
        layer_from(
            read_weight, number, shape.head_dim, residual, rotated=is_rotated(config, number)
        )
        for number in range(shape.layers)
    ]


def _rows_at_once(device: torch.device, vocab: int) -> int:
    """Return for how many tokens logits are computed at once: for so many that their logits, each a
    float32 for `vocab` ids, take HEAD_BYTES, but at least 128."""
    logit_bytes = HEAD_BYTES.get(device.type, 2**24)  # 2**24: on any other device
    return max(128, logit_bytes // (4 * vocab))  # a float32 has 4 bytes


def no_rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables in the shapes of `cos` and `sin`, all ones and all zeros, whose rotation leaves
    every vector as it is."""
    return torch.ones_like(cos), torch.zeros_like(sin)
