"""Bytes of a model with its adapter, and of each token that runs through it.

For our own forward, the numbers that are kept for the backward pass are those that its autograd
nodes save (engine/worker/ops/kernels.py). A test compares them with what torch keeps on the meta
device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.models.model_files import ModelFacts

_WIDTH = {"float32": 4, "bfloat16": 2}
_NF4_WIDTH = 0.55  # bytes of a weight in 4 bits, with its share of its block's scales
# Bytes per parameter of the adapter: float32 weights, gradients and the two moments of AdamW. On a
# GPU our own forward also keeps a 16-bit copy, in which the B factors are padded with zeros.
_ADAPTER_BYTES, _CAST_ADAPTER_BYTES = 16, 4
FITS = 0.92  # a run that needs more than this share of a device's memory is refused
# Bytes of logits that are computed at once. So few stay in a CPU's cache; a GPU is faster with
# larger products.
HEAD_BYTES = {"cpu": 2**21, "cuda": 2**28}
LEAST_LOGIT_ROWS = 128  # the logits of at least so many tokens are computed at once
ATTENTION_KEPT = 640  # on a CPU, rows up to this length keep their attention for the backward pass
# Bytes per id of the vocabulary that drawing a token takes: logits in the weights' format and in
# float32, log-softmax and probabilities in float32, and the values they are compared with.
_DRAWN_BYTES = {"cpu": 12, "cuda": 18}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its adapter, in the number format in which it is loaded.

    Attributes:
        precision: float32 or bfloat16.
        quantization: none or nf4.
        shards: the number of devices that each layer is cut over; 1 keeps all layers on one.
    """

    model: ModelFacts
    precision: str
    quantization: str
    lora_rank: int
    lora_targets: Sequence[str]
    shards: int = 1

    @property
    def width(self) -> int:
        """Bytes of a frozen weight and of an activation."""
        return _WIDTH[self.precision]

    @property
    def weights(self) -> float:
        """Bytes of the frozen weights on a device, all experts included. Quantization puts the
        layers' matrices into 4 bits, but not those of experts.

        With shards, a device holds its parts of all layers, and two whole layers: the one being
        computed and the next, which is gathered meanwhile.
        """
        if self.shards > 1:
            # The embedding and the output layer, which are one tensor in a tied model.
            matrices_outside = 1 if self.model.tied else 2
            params_outside = self.model.vocab * self.model.hidden * matrices_outside
            params_in_layers = max(0, self.model.params - params_outside)
            params_of_two_layers = 2 * params_in_layers / max(1, self.model.layers)
            share_of_layers = params_in_layers / self.shards
            return (params_outside + share_of_layers + params_of_two_layers) * self.width
        if self.quantization == "none":
            return self.model.params * self.width
        quantized = self.model.dense_params
        return quantized * _NF4_WIDTH + (self.model.params - quantized) * self.width

    @property
    def adapter(self) -> int:
        """Number of parameters of the adapter."""
        return self.model.adapter_params(self.lora_rank, list(self.lora_targets))

    @property
    def own_forward(self) -> bool:
        """Whether our own forward computes the model; it supports no 4-bit weights and no
        shards."""
        return self.model.own_forward and self.quantization == "none" and self.shards == 1

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all layers that store them."""
        return self.model.cached_numbers * self.width


def trained_adapter_bytes(loaded: LoadedModel, kind: str) -> float:
    """Return the bytes of the model's adapter with its gradients and optimizer, if it is trained on
    a device of this `kind` (cpu or cuda)."""
    is_cast = kind != "cpu" and loaded.own_forward
    bytes_per_parameter = _ADAPTER_BYTES
    if is_cast:
        bytes_per_parameter += _CAST_ADAPTER_BYTES
    return loaded.adapter * bytes_per_parameter


def kept_numbers_per_layer(model: ModelFacts, kind: str, length: float) -> float:
    """Count the numbers that one layer of the project's own forward pass keeps of each token for
    the backward pass.

    Args:
        kind: of the device, cpu or cuda.
        length: tokens of a typical row (a training sequence).
    """
    queries = model.heads * model.head_dim
    keys = model.kv_heads * model.head_dim  # as many as values
    # A layer has two norms. Each keeps its result, and on a GPU also the normalised numbers before
    # they are multiplied by its weight (ops/norms.py).
    kept_per_norm = 1 if kind == "cpu" else 2
    norms = 2 * kept_per_norm * model.hidden
    attention = 2 * queries + 2 * keys  # queries, keys, values and the attention's output
    head_norms = queries + keys  # normalised copies; counted although not every model has them
    mlp = 2 * model.intermediate  # gate and up
    numbers = norms + attention + head_norms + mlp
    if kind == "cpu":
        # Short rows keep the weights of attention: a token sees half of its row on average. Longer
        # rows are counted as rows of ATTENTION_KEPT tokens.
        numbers += model.heads * min(length, ATTENTION_KEPT) / 2
    return numbers


def trained_token_bytes(
    loaded: LoadedModel, kind: str, *, recomputes: bool, length: float
) -> float:
    """Estimate the peak bytes of activations for each token of a microbatch (the tokens that go
    through the model at once) of the project's own forward pass, without the logits.

    Args:
        kind: of the device, cpu or cuda.
        recomputes: whether activations are computed again in the backward pass.
        length: tokens of a typical row.
    """
    model = loaded.model
    numbers_per_layer = kept_numbers_per_layer(model, kind, length)
    # The gradients inside one layer: about six vectors of the hidden width and six of the MLP's.
    gradients = 6 * (model.hidden + model.intermediate)
    if recomputes:
        # The two inputs of each layer, and all numbers of the one layer that is being recomputed.
        kept = model.layers * 2 * model.hidden + numbers_per_layer
    else:
        kept = model.layers * numbers_per_layer
    # Outside the layers: the float32 input of the output layer and its gradient.
    return loaded.width * (kept + gradients) + 8 * model.hidden


def foreign_token_bytes(model: ModelFacts, *, recomputes: bool) -> float:
    """Estimate the bytes of each token of a microbatch in the forward pass of the library
    transformers, its logits included. That pass keeps most intermediate results, many of them in
    float32. `recomputes` says whether activations are computed again in the backward pass."""
    numbers_per_layer = 18 * model.hidden + 5 * model.intermediate
    kept_layers = 2 if recomputes else model.layers
    activation_bytes = 4 * (kept_layers * numbers_per_layer + 4 * model.hidden)
    # Three float32 numbers (of 4 bytes) per entry of the vocabulary: logits, log-softmax, gradient.
    return activation_bytes + 12 * model.vocab


def trained_logit_bytes(model: ModelFacts, kind: str, tokens: float) -> float:
    """Estimate the peak bytes of the logits of a microbatch of `tokens` tokens, on a device of this
    `kind` (cpu or cuda). They are computed in chunks, so only those of one chunk are in memory at a
    time."""
    token_bytes = 4 * model.vocab  # float32
    chunk_bytes = max(LEAST_LOGIT_ROWS * token_bytes, HEAD_BYTES[kind])
    # The logits, their log-softmax and its gradient.
    return 3 * min(chunk_bytes, tokens * token_bytes)


def sampled_row_bytes(loaded: LoadedModel, kind: str, length: float) -> tuple[float, float]:
    """Estimate the bytes of one completion that is being sampled: (keys and values, logits).

    Args:
        kind: of the device, cpu or cuda.
        length: tokens of the completion with its prompt.
    """
    # A cache that grows is copied layer by layer, so one layer's old and new tensors coexist.
    copies = 1 + 1 / max(1, loaded.model.attention_layers)
    cache_bytes = length * loaded.cache_token_bytes * copies
    return cache_bytes, loaded.model.vocab * _DRAWN_BYTES[kind]


def overhead_bytes(kind: str, model_bytes: float) -> float:
    """Estimate the bytes that a process takes beside `model_bytes`, the bytes of weights, adapter,
    activations and cache: a fixed part and a share of `model_bytes`.

    On a GPU the fixed part is its context with the kernels, on a CPU the interpreter with torch.
    The share is lost to fragmentation, and on a CPU also to the code that oneDNN compiles for every
    size of matrix product.
    """
    fixed, share = OVERHEAD[kind]
    return fixed + share * model_bytes


OVERHEAD = {"cpu": (3.6e8, 0.08), "cuda": (1.3e9, 0.06)}  # fixed bytes, share of the others
