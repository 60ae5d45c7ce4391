"""The decoder's layers without gradients: prompts read at once, then one token per row and step."""

from collections.abc import Callable, Sequence

import torch

from engine.worker.network.adapter import Factors
from engine.worker.network.cache import Prompts
from engine.worker.network.decoder import AdaptedLinear, Decoder, Weights, no_rotation
from engine.worker.network.shape import Shape
from engine.worker.network.weights import Layer
from engine.worker.ops.attention import Attention
from engine.worker.ops.compiled import Eps
from engine.worker.ops.fused_ops import per_head
from engine.worker.ops.matmul import Fixed
from engine.worker.ops.packing import Layout

# Tokens of prompts that go through the model at once.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}

# Takes the number of a layer and its queries, keys (both rotated) and values, [N, heads + 2
# kv_heads, dim]; returns the attention's output for each token, [N, heads * dim].
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class Forward:
    """A decoder with the weights that it had when this object was made; see the module."""

    def __init__(self, decoder: Decoder, weights: Weights, vocab: int, length: int) -> None:
        """Lay out the decoder's weights for sampling, as they are now.

        Args:
            weights: base alone or with an adapter, merged or not.
            vocab: ids at or above it get no logits.
            length: how many positions there may be, those of rows that have ended included.
        """
        self.decoder = decoder
        self.length = length
        self.shape = decoder.shape
        pack = decoder.packs_weights
        self.head = decoder.output_layer(vocab).logits
        self.layers = [
            (layer, [_Product(adapted, pack=pack) for adapted in weights.of(number)])
            for number, layer in enumerate(decoder.layers)
        ]
        cos, sin = decoder.rope(length)
        self.rope = (torch.cat([cos, cos], -1), sin)  # cos for both halves at once
        self.head_norms = [_head_norm(layer, self.shape) for layer in decoder.layers]
        self.has_unrotated_layers = any(not layer.rotated for layer in decoder.layers)
        self.functions = decoder.functions
        self.eps = Eps(decoder.eps, torch.full((1,), decoder.eps, device=decoder.device))

    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[Prompts, torch.Tensor]:
        """Run prompts through the model, in chunks of similar lengths. Returns (their keys and
        values, the logits after the last token of each, [prompts, vocab] float32)."""
        shape = self.shape
        device = self.decoder.device
        lengths = [len(prompt) for prompt in prompts]
        size = (shape.layers, len(prompts), shape.kv, max(lengths), shape.head_dim)
        keys = torch.zeros(size, dtype=self.decoder.dtype, device=device)
        values = torch.zeros_like(keys)
        logits = torch.empty((len(prompts), self.head.weight.shape[0]), device=device)
        for chunk in _chunks(lengths, PREFILL_TOKENS[device.type]):
            logits[chunk] = self._read_chunk(prompts, chunk, keys, values)
        return Prompts(keys, values, lengths), logits

    def _read_chunk(
        self,
        prompts: Sequence[Sequence[int]],
        chunk: Sequence[int],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Run the prompts with the numbers in `chunk` through the model, and write their keys and
        values into `keys` and `values` [layers, prompts, kv_heads, longest, dim]. Returns the
        logits after the last token of each, [chunk, vocab] float32."""
        shape, device = self.shape, self.decoder.device
        lengths = [len(prompts[i]) for i in chunk]
        # The plan of attention is cached and used in training too, where tensors that were made in
        # inference mode cannot be used.
        with torch.inference_mode(False):
            layout = Layout(prefixes=tuple(lengths), suffixes=(), owners=())
            attention = Attention(layout, shape.heads, shape.kv, device, keys.dtype)
        # For every token: the number of its prompt, its position in that prompt, and its id.
        prompt_numbers = torch.tensor([i for i in chunk for _ in prompts[i]], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        ids = torch.tensor([token for i in chunk for token in prompts[i]], device=device)

        def attend(layer: int, heads: torch.Tensor) -> torch.Tensor:
            """See `Attend`; also stores the layer's keys and values."""
            _, k, v = heads.split([shape.heads, shape.kv, shape.kv], 1)
            keys[layer][prompt_numbers, :, positions] = k
            values[layer][prompt_numbers, :, positions] = v
            return attention(heads.flatten(1))

        last_tokens = torch.tensor(lengths).cumsum(0).to(device) - 1
        return self.logits(self._hidden(ids, positions, attend, last_tokens))

    def step(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The logits after one more token per row, [rows, vocab] float32.

        Args:
            ids, positions: [rows], the tokens and their positions.
            attend: stores the tokens' keys and values in the cache and computes their attention.
        """
        return self.logits(self._hidden(ids, positions, attend, needed=None))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()

    def _hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        needed: torch.Tensor | None,
    ) -> torch.Tensor:
        """The hidden states after the last norm, [needed tokens, hidden].

        Args:
            ids, positions: [tokens].
            attend: computes the attention of each layer.
            needed: indices of the tokens whose hidden states are needed; after its attention the
                last layer computes only these. None: all tokens.
        """
        shape, functions, eps = self.shape, self.functions, self.eps
        cos, sin = (table.index_select(0, positions) for table in self.rope)
        # For layers that do not rotate; not needed where every layer does.
        no_angles = no_rotation(cos, sin) if self.has_unrotated_layers else (cos, sin)
        x = self.decoder.embed(ids)
        for number, (layer, (qkv, o, gate_up, down)) in enumerate(self.layers):
            y = x if layer.norm_in is None else functions.plain_norm(x, layer.norm_in, eps)
            projected = qkv(y)
            if layer.whole_norms is not None:
                projected = self._wholly_normed(projected, *layer.whole_norms)
            heads = projected.view(len(x), -1, shape.head_dim)
            angles = (cos, sin) if layer.rotated else no_angles
            functions.plain_apply_rope(
                heads, self.head_norms[number], shape.heads, shape.kv, *angles, eps
            )
            attended = attend(number, heads)
            if needed is not None and number == len(self.layers) - 1:
                attended, x = attended.index_select(0, needed), x.index_select(0, needed)
            out = o(attended)
            if layer.norm_attended is not None:
                out = functions.plain_norm(out, layer.norm_attended, eps)
            x = x + out
            y = x if layer.norm_mid is None else functions.plain_norm(x, layer.norm_mid, eps)
            out = down(functions.gate(gate_up(y)))
            if layer.norm_mlp is not None:
                out = functions.plain_norm(out, layer.norm_mlp, eps)
            x += out
        return functions.plain_norm(x, self.decoder.norm, eps)

    def _wholly_normed(
        self, heads: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> torch.Tensor:
        """Queries, keys and values [N, (heads + 2 kv_heads) * dim], with all queries of a token
        normalised together, and so its keys."""
        keys_width = len(k_norm)
        q, k, v = heads.split([len(q_norm), keys_width, keys_width], 1)
        q = self.functions.plain_norm(q.contiguous(), q_norm, self.eps)
        k = self.functions.plain_norm(k.contiguous(), k_norm, self.eps)
        return torch.cat([q, k, v], 1)


def _chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide prompts, from the shortest to the longest, into chunks of at most `max_tokens` tokens;
    a longer prompt is a chunk of its own. Returns the numbers of each chunk's prompts.

    Args:
        lengths: of the prompts, in tokens.
    """
    chunks: list[list[int]] = []
    tokens_left = 0  # in the last chunk
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not chunks or lengths[i] > tokens_left:
            chunks.append([])
            tokens_left = max_tokens
        chunks[-1].append(i)
        tokens_left -= lengths[i]
    return chunks


def _head_norm(layer: Layer, shape: Shape) -> torch.Tensor | None:
    """The norm weight of every query and key head of a layer, [heads + kv_heads, dim]; None if the
    model does not normalise them."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return per_head(layer.q_norm, layer.k_norm, shape.heads, shape.kv)


class _Product:
    """One linear layer with its adapter, merged or as a second product of low rank."""

    def __init__(self, adapted: AdaptedLinear, *, pack: bool) -> None:
        """Prepare the product of `adapted`, the layer as the training forward has it, and those of
        the adapter's two factors, unless it is merged into the weight. With `pack` a second copy of
        the weight is made in a faster layout."""
        self.product = Fixed(adapted.weight, pack=pack)
        self.bias = adapted.linear.bias
        self.scale = adapted.scale
        self.a = self.b = None
        if adapted.factors is not None and adapted.merged is None:
            # [in, parts * rank] and [parts * rank, out]
            self.a = adapted.factors.a.detach().to(adapted.weight.dtype).t()
            self.b = _joint_b(adapted.factors, adapted.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, out] for x [N, in]."""
        y = self.product(x, self.bias)
        if self.a is not None and self.b is not None:
            y.addmm_(x @ self.a, self.b, alpha=self.scale)
        return y


def _joint_b(factors: Factors, weight: torch.Tensor) -> torch.Tensor:
    """The factors B of all parts, transposed, in one matrix [parts * rank, out]. Each part has rows
    and columns of its own; everything else is zero. `weight` is the layer's [out, in]."""
    rank = factors.b.shape[1]
    joint = weight.new_zeros(len(factors.parts) * rank, weight.shape[0])
    spans_and_parts = zip(factors.spans, factors.parts, strict=True)
    for number, ((start, stop), part) in enumerate(spans_and_parts):
        b = factors.b.detach()[part.b]
        joint[number * rank : (number + 1) * rank, start:stop] = b.t()
    return joint
