"""The decoder's layers without gradients: prompts read at once, then one token per row and step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.worker.network.cache import Prompts
from engine.worker.network.decoder import Decoder, no_rotation
from engine.worker.network.shape import Shape
from engine.worker.network.weights import AdaptedLinear, Layer, LayerWeights, Weights
from engine.worker.ops.attention import Attention
from engine.worker.ops.compiled import Eps
from engine.worker.ops.low_rank import fill_joint
from engine.worker.ops.matmul import FixedWeight
from engine.worker.ops.norms import norm_weight_per_head
from engine.worker.ops.packing import Layout

# Tokens of prompts that go through the model at once.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}

# Takes the number of a layer and its queries, keys (both rotated) and values, [N, heads + 2
# kv_heads, dim]; returns the attention's output for each token, [N, heads * dim].
Attend = Callable[[int, torch.Tensor], torch.Tensor]

# (cos [tokens, 1, head_dim], each value for both halves of a head; sin [tokens, 1, head_dim / 2])
Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _StoringAttention:
    """The attention over packed tokens of prompts, callable as an `Attend`. It also stores the keys
    and values of each layer.

    Attributes:
        prompts: where keys and values are stored.
        numbers, positions: for each token the number of its prompt in `prompts`, and its position
            in that prompt.
    """

    attention: Attention
    prompts: Prompts
    numbers: torch.Tensor
    positions: torch.Tensor

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Compute the attention's output [N, heads * dim] of a layer for the tokens' queries, keys
        and values `heads` [N, heads + 2 kv_heads, dim]. Also write the tokens' keys and values into
        `prompts`, whose tensors are [prompts, kv_heads, longest, dim] for each layer."""
        kv_heads = self.prompts.keys[0].shape[1]
        _, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
        # Token t goes to [numbers[t], :, positions[t]] of the layer: all its heads at once.
        self.prompts.keys[layer][self.numbers, :, self.positions] = k
        self.prompts.values[layer][self.numbers, :, self.positions] = v
        return self.attention(heads.flatten(1))


class Forward:
    """A decoder's forward pass for sampling, with the weights it had when this object was made; see
    the module."""

    def __init__(self, decoder: Decoder, weights: Weights, vocab: int, length: int) -> None:
        """Lay out the decoder's weights for sampling, as they are now.

        Args:
            weights: base alone or with an adapter, merged or not.
            vocab: ids from this number on have no token and get no logits.
            length: how many positions a row may reach. The position of a row that has ended still
                grows while other rows go on, so this is more than its prompt and answer have.
        """
        self.decoder = decoder
        self.length = length
        self.shape = decoder.shape
        pack = decoder.packs_weights  # whether to copy each weight into a faster layout
        self.head = decoder.output_layer(vocab)
        self.layers = [
            (layer, _Products.from_layer(weights.layer(number), pack=pack))
            for number, layer in enumerate(decoder.layers)
        ]
        # The angles turn pairs: a number of a head's first half and one of its second half. cos is
        # the same factor for both of a pair, so it is repeated for a product with the whole head.
        # sin has another sign for each half, so its products are done half by half.
        cos, sin = decoder.rope(length)
        self.rope = (torch.cat([cos, cos], -1), sin)
        self.head_norms = [_head_norm(layer, self.shape) for layer in decoder.layers]
        self.has_unrotated_layers = any(not layer.rotated for layer in decoder.layers)
        self.functions = decoder.functions  # norms, rotations and gates
        # Some of these functions take eps as a number, others as a tensor on the device.
        eps_tensor = torch.full((1,), decoder.eps, device=decoder.device)
        self.eps = Eps(number=decoder.eps, tensor=eps_tensor)

    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[Prompts, torch.Tensor]:
        """Run prompts (lists of token ids) through the model, in chunks of prompts of similar
        lengths. Returns (their keys and values, the logits after the last token of each prompt
        [prompts, vocab] float32), both in the order of `prompts`."""
        keys_and_values = self._memory_for_prompts([len(prompt) for prompt in prompts])
        device = self.decoder.device
        logits = torch.empty((len(prompts), self.head.weight.shape[0]), device=device)
        for chunk in _chunks(keys_and_values.lengths, PREFILL_TOKENS[device.type]):
            logits[chunk] = self._read_chunk(prompts, chunk, target=keys_and_values)
        return keys_and_values, logits

    def _memory_for_prompts(self, lengths: list[int]) -> Prompts:
        """Allocate memory, filled with zeros, for the keys and values of prompts of these
        `lengths`, in tokens."""
        shape, decoder = self.shape, self.decoder
        size = (len(lengths), shape.kv_heads, max(lengths), shape.head_dim)

        def zeros_for_layers() -> list[torch.Tensor]:
            """Allocate one tensor [prompts, kv_heads, longest, dim] for each layer, for its keys or
            for its values."""
            return [
                torch.zeros(size, dtype=decoder.dtype, device=decoder.device)
                for _ in range(shape.layers)
            ]

        return Prompts(keys=zeros_for_layers(), values=zeros_for_layers(), lengths=lengths)

    def _read_chunk(
        self, prompts: Sequence[Sequence[int]], chunk: Sequence[int], target: Prompts
    ) -> torch.Tensor:
        """Run some of the prompts through the model and store their keys and values in `target`.

        `chunk` holds the numbers of these prompts in `prompts`, which are also their places in
        `target`. Returns the logits after the last token of each, [chunk, vocab] float32.
        """
        lengths = [len(prompts[number]) for number in chunk]
        device = self.decoder.device
        ids = torch.tensor([token for number in chunk for token in prompts[number]], device=device)
        prompt_numbers, positions = _places_of_tokens(chunk, lengths, device)
        attend = _StoringAttention(self._attention(lengths), target, prompt_numbers, positions)
        last_tokens = torch.tensor(lengths).cumsum(0).to(device) - 1
        return self.logits(self._hidden(ids, positions, attend, last_tokens))

    def _attention(self, lengths: Sequence[int]) -> Attention:
        """Plan the attention over prompts of these lengths (in tokens), packed one after the
        other: each token sees its own prompt up to itself."""
        shape, decoder = self.shape, self.decoder
        # The plan of attention is cached and used in training too, where tensors that were made in
        # inference mode cannot be used.
        with torch.inference_mode(False):
            layout = Layout(prefix_lengths=tuple(lengths), suffix_lengths=(), owners=())
            return Attention(layout, shape.heads, shape.kv_heads, decoder.device, decoder.dtype)

    def step(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run one more token per row through the model, and return the logits after it, [rows,
        vocab] float32.

        Args:
            ids, positions: [rows], the tokens and their positions.
            attend: stores the tokens' keys and values in the cache and computes their attention.
        """
        return self.logits(self._hidden(ids, positions, attend, needed=None))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the output layer: compute the logits [rows, vocab] float32 of hidden states [rows,
        hidden] after the last norm."""
        return self.head.float_logits(hidden)

    def _hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        needed: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the hidden states after the last norm, [needed tokens, hidden].

        Args:
            ids, positions: [tokens], the tokens and their positions in their rows.
            attend: computes the attention of each layer.
            needed: indices of the tokens whose hidden states are needed. The last layer computes
                only these after its attention. None: all tokens.
        """
        angles, no_angles = self._angles(positions)
        x = self.decoder.embed(ids)
        for number, (layer, products) in enumerate(self.layers):
            heads = products.qkv(self._normed(x, layer.norm_in))
            layer_angles = angles if layer.rotated else no_angles
            attended = attend(number, self._rotated_heads(number, layer, heads, layer_angles))
            if needed is not None and number == len(self.layers) - 1:
                attended, x = attended.index_select(0, needed), x.index_select(0, needed)
            x = self._after_attention(layer, products, x, attended)
        return self._normed(x, self.decoder.norm)

    def _after_attention(
        self, layer: Layer, products: "_Products", x: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        """Compute the residual stream after a layer, [N, hidden], from the residual stream before
        the layer (`x`) and the attention's output (`attended`, [N, heads * dim])."""
        # A new tensor, so that the caller's x stays as it is; below only this new one changes.
        x = x + self._normed(products.o(attended), layer.norm_attended)
        gate_up = products.gate_up(self._normed(x, layer.norm_mid))
        x += self._normed(products.down(self.functions.gate(gate_up)), layer.norm_mlp)
        return x

    def _angles(self, positions: torch.Tensor) -> tuple[Angles, Angles]:
        """Return two pairs (cos, sin) of rotary positions: those at the `positions` [tokens], and
        those for layers that do not rotate. If every layer of the model rotates, the second pair is
        never used, and is the same as the first."""
        cos, sin = (table.index_select(0, positions) for table in self.rope)
        unrotated = no_rotation(cos, sin) if self.has_unrotated_layers else (cos, sin)
        return (cos, sin), unrotated

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """The RMS norm of x, multiplied by `weight`; x itself if `weight` is None."""
        return x if weight is None else self.functions.plain_norm(x, weight, self.eps)

    def _rotated_heads(
        self,
        number: int,
        layer: Layer,
        qkv: torch.Tensor,
        angles: Angles,
    ) -> torch.Tensor:
        """Compute queries, keys and values [N, heads + 2 kv_heads, dim] of layer `number` from qkv
        [N, (heads + 2 kv_heads) * dim], the output of its first product. Queries and keys are
        normalised, if the model does that, and rotated by `angles` (cos, sin). May overwrite
        qkv."""
        # Some models normalise all heads of a token together (here), others each one (below).
        if layer.whole_norms is not None:
            qkv = self._wholly_normed(qkv, *layer.whole_norms)
        shape = self.shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        self.functions.plain_apply_rope(  # in place
            heads, self.head_norms[number], shape.heads, shape.kv_heads, *angles, self.eps
        )
        return heads

    def _wholly_normed(
        self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> torch.Tensor:
        """Return qkv [N, (heads + 2 kv_heads) * dim] with queries and keys normalised: all query
        heads of a token as one vector with the norm weight `q_norm` [heads * dim], and all its key
        heads as another with `k_norm` [kv_heads * dim]. Values stay as they are."""
        keys_width = len(k_norm)
        q, k, v = qkv.split([len(q_norm), keys_width, keys_width], 1)
        q, k = self._normed(q.contiguous(), q_norm), self._normed(k.contiguous(), k_norm)
        return torch.cat([q, k, v], 1)


def _chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide prompts, from the shortest to the longest, into chunks of at most `max_tokens` tokens.
    A prompt with more tokens is a chunk of its own.

    `lengths` holds the number of tokens of each prompt. Returns for each chunk the indices of its
    prompts.
    """
    chunks: list[list[int]] = []
    tokens_left = 0  # in the last chunk
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not chunks or lengths[number] > tokens_left:
            chunks.append([])
            tokens_left = max_tokens
        chunks[-1].append(number)
        tokens_left -= lengths[number]
    return chunks


def _head_norm(layer: Layer, shape: Shape) -> torch.Tensor | None:
    """Make one tensor of the norm weights of all query heads and then all key heads of a layer,
    [heads + kv_heads, dim]; None if the model does not normalise heads one by one."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return norm_weight_per_head(layer.q_norm, layer.k_norm, shape.heads, shape.kv_heads)


def _places_of_tokens(
    chunk: Sequence[int], lengths: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors [tokens] int64: for every token of some prompts, the number of its prompt
    and its position in that prompt. `chunk` holds the numbers of the prompts, `lengths` how many
    tokens each has."""
    numbers = [number for number, length in zip(chunk, lengths, strict=True) for _ in range(length)]
    prompt_numbers = torch.tensor(numbers, device=device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return prompt_numbers, positions


class _Product:
    """One linear layer with its adapter, which is merged into the weight or a second product of low
    rank."""

    def __init__(self, adapted: AdaptedLinear, *, pack: bool) -> None:
        """Prepare the product with the weight of `adapted`, a layer of the training forward. If
        that has an adapter that is not merged into the weight, also prepare the products with its
        two factors.

        With `pack`, a second copy of the weight is made in a faster layout.
        """
        self.product = FixedWeight(adapted.weight, pack=pack)
        self.bias = adapted.linear.bias
        self.scale = adapted.scale
        self.a = self.b = None
        if adapted.factors is not None and adapted.merged is None:
            # [in, parts * rank] and [parts * rank, out], for one product over all parts.
            a, weight = adapted.factors.a.detach(), adapted.weight
            joint_b = weight.new_zeros(weight.shape[0], a.shape[0])
            fill_joint(joint_b, adapted.factors.b, adapted.factors.spans)
            self.a, self.b = a.to(weight.dtype).t(), joint_b.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output [N, out] for x [N, in]. The adapter's part, scale * x A B, is
        added here unless it is merged into the weight."""
        y = self.product(x, self.bias)
        if self.a is not None and self.b is not None:
            y.addmm_(x @ self.a, self.b, alpha=self.scale)
        return y


class _Products(NamedTuple):
    """The products of one layer, under the names that `Layer` gives its matrices."""

    qkv: _Product
    o: _Product
    gate_up: _Product
    down: _Product

    @classmethod
    def from_layer(cls, linears: LayerWeights, *, pack: bool) -> "_Products":
        """Make the products of a layer's four matrices, given in the order qkv, o, gate_up, down.
        `pack` makes second copies of the weights in a faster layout."""
        return cls(*(_Product(adapted, pack=pack) for adapted in linears))
