"""A decoder's weights: read from a folder's safetensors files, fused layer by layer, and combined
with an adapter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch.nn import functional as F

from engine.worker.network.adapter import Factors, FlatAdapter, Projection, Slot
from engine.worker.ops.fused_ops import LayerFunctions
from engine.worker.ops.kernels import FrozenLinear, GatedLoraLinear, LoraLinear, SwiGLU
from engine.worker.ops.low_rank import JointFactors, LoraPlacement, fill_joint

# Gives the weight with a name as transformers spells it; None if the model has no such weight.
ReadWeight = Callable[[str], torch.Tensor | None]


@dataclass(frozen=True)
class Linear:
    """A frozen layer, fused from one or more projections of the same input.

    Attributes:
        weight: [out, in]; bias: [out] or None.
        slot: names and spans of its projections.
        factor: the model multiplies the layer's output by this number. Weight and bias contain it
            already, so only an adapter's output still has to be scaled by it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    slot: Slot
    factor: float = 1.0


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Most families normalise the inputs of attention and MLP (`norm_in`,
    `norm_mid`), others their outputs (`norm_attended`, `norm_mlp`). A norm that the model does not
    have is None.

    Attributes:
        q_norm, k_norm: [head_dim], norms of each head by itself.
        whole_norms: [heads * head_dim] and [kv_heads * head_dim], norms of all queries and all keys
            of a token together.
        rotated: whether queries and keys are turned by their positions.
    """

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norm_in: torch.Tensor | None
    norm_mid: torch.Tensor | None
    norm_attended: torch.Tensor | None
    norm_mlp: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    whole_norms: tuple[torch.Tensor, torch.Tensor] | None
    rotated: bool = True

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The four matrices of the layer, in the order in which they are applied."""
        return self.qkv, self.o, self.gate_up, self.down


@contextmanager
def open_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[ReadWeight]:
    """Open the safetensors files of `folder`, until the context ends. The context's value is a
    function that takes a weight's name and returns the weight, or None if no file has it. A weight
    is read from its file when the function is called, converted to `dtype` and put on `device`."""
    with ExitStack() as stack:
        file_of_weight: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened_file = stack.enter_context(safe_open(file, framework="pt"))
            file_of_weight |= dict.fromkeys(opened_file.keys(), opened_file)

        def read_weight(name: str) -> torch.Tensor | None:
            """Return the weight of this name on the device; None if no file has it."""
            if name not in file_of_weight:
                return None
            return file_of_weight[name].get_tensor(name).to(device, dtype)

        yield read_weight


def layer_from(
    read_weight: ReadWeight, number: int, head_dim: int, residual: float, *, rotated: bool
) -> Layer:
    """Build layer `number`, from 0, from the weights that `read_weight` gives by name. Projections
    that read the same input are fused into one matrix, unless the model's files have them fused
    already. Raises KeyError if a weight is missing.

    Args:
        head_dim: width of one head.
        residual: factor of the outputs of attention and MLP.
        rotated: whether the layer's queries and keys are turned by their positions.
    """
    name = f"model.layers.{number}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    norms = _norms(read_weight, name)
    q_norm, k_norm, whole_norms = _head_norms(read_weight, attention, head_dim)
    return Layer(
        # `_read_fused` gives None, and `_fuse` is called, unless the files have them fused already.
        qkv=_read_fused(read_weight, f"{attention}.qkv_proj")
        or _fuse(read_weight, f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        o=_scale_output(_fuse(read_weight, f"{attention}.o_proj"), residual),
        gate_up=_read_fused(read_weight, f"{mlp}.gate_up_proj")
        or _fuse(read_weight, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=_scale_output(_fuse(read_weight, f"{mlp}.down_proj"), residual),
        norm_in=norms.before_attention,
        norm_mid=norms.before_mlp,
        norm_attended=norms.after_attention,
        norm_mlp=norms.after_mlp,
        q_norm=q_norm,
        k_norm=k_norm,
        whole_norms=whole_norms,
        rotated=rotated,
    )


class _Norms(NamedTuple):
    """The weights of a layer's norms, by their place in the layer; None where the layer has no
    norm."""

    before_attention: torch.Tensor | None
    after_attention: torch.Tensor | None
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None


def _norms(read_weight: ReadWeight, layer: str) -> _Norms:
    """Read the weights of the layer's four possible norms; `layer` is the beginning of their names,
    such as "model.layers.0". A layer has two of them: those before attention and MLP, or those
    after. Raises KeyError if a weight is missing."""
    before_attention = read_weight(f"{layer}.input_layernorm.weight")
    # In a layer that begins with a norm, the norm of this name stands before the MLP. In a layer
    # that begins with none (OLMo 2), it follows the attention.
    post_attention = required_weight(read_weight, f"{layer}.post_attention_layernorm.weight")
    if before_attention is not None:
        return _Norms(
            before_attention=before_attention,
            after_attention=None,
            before_mlp=post_attention,
            after_mlp=None,
        )
    after_mlp = required_weight(read_weight, f"{layer}.post_feedforward_layernorm.weight")
    return _Norms(
        before_attention=None,
        after_attention=post_attention,
        before_mlp=None,
        after_mlp=after_mlp,
    )


def _head_norms(
    read_weight: ReadWeight, attention: str, head_dim: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """Read (`q_norm`, `k_norm`, `whole_norms`) of a `Layer`; each is None if the model does not
    have it. `attention` is the beginning of the weights' names, such as "model.layers.0.self_attn".

    Norms of single heads and norms of all heads together have the same names; only their sizes
    differ.
    """
    q_norm = read_weight(f"{attention}.q_norm.weight")
    k_norm = read_weight(f"{attention}.k_norm.weight")
    if q_norm is not None and k_norm is not None and q_norm.numel() != head_dim:
        return None, None, (q_norm, k_norm)
    return q_norm, k_norm, None


def _read_fused(read_weight: ReadWeight, name: str) -> Linear | None:
    """Read a linear layer whose projections the model itself keeps fused in one weight called
    `name`, such as Phi-3's "...self_attn.qkv_proj". Returns None if the model has no such
    weight."""
    weight = read_weight(f"{name}.weight")
    if weight is None:
        return None
    projection = Projection(name, start=0, stop=weight.shape[0])  # all outputs of the layer
    slot = Slot((projection,), features=weight.shape[1])
    return Linear(weight, read_weight(f"{name}.bias"), slot)


def _scale_output(linear: Linear, factor: float) -> Linear:
    """Multiply the layer's weight and bias, and so its output, by `factor`; with 1 return the layer
    itself. The result also records the factor, because an adapter on the layer has to be scaled by
    it too."""
    if factor == 1:
        return linear
    bias = None if linear.bias is None else linear.bias * factor
    return Linear(linear.weight * factor, bias, linear.slot, factor=factor)


def _fuse(read_weight: ReadWeight, *names: str) -> Linear:
    """Read the projections with these names, which read the same input, and fuse them into one
    linear layer: its outputs are theirs, one projection after the other. Raises KeyError if a
    weight is missing."""
    projections, weights, biases = [], [], []
    offset = 0  # in the layer's outputs
    for name in names:
        weight = required_weight(read_weight, f"{name}.weight")
        weights.append(weight)
        biases.append(read_weight(f"{name}.bias"))
        projections.append(Projection(name, start=offset, stop=offset + weight.shape[0]))
        offset += weight.shape[0]
    joint_weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    slot = Slot(tuple(projections), features=joint_weight.shape[1])
    return Linear(joint_weight, _joint_bias(weights, biases), slot)


def _joint_bias(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """Concatenate the biases of several projections, [all outputs]; a projection without a bias
    (None) gets zeros. Returns None if no projection has a bias. `weights` are the projections'
    weights [out, in], which tell how many zeros."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            weight.new_zeros(weight.shape[0]) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )


def required_weight(read_weight: ReadWeight, name: str) -> torch.Tensor:
    """Return the weight called `name`. Raises KeyError if `read_weight` gives None for it, because
    the model has none."""
    weight = read_weight(name)
    if weight is None:
        raise KeyError(name)
    return weight


class AdaptedLinear:
    """A frozen layer as the forward pass calls it, with its adapter if it has one."""

    def __init__(
        self,
        linear: Linear,
        factors: Factors | None = None,
        scale: float = 0.0,
        merged: torch.Tensor | None = None,
        joint: JointFactors | None = None,
    ) -> None:
        """Keep the frozen layer `linear` and its adapter.

        Args:
            factors: the adapter's factors A and B for this layer; None without an adapter.
            scale: factor of the adapter's output.
            merged: memory [out, in] that `refresh` fills with the sum of weight and adapter; None:
                the adapter is not merged.
            joint: the factors laid out for one product over all projections; `refresh` fills in its
                b. None: each projection's factors are multiplied by themselves.
        """
        self.linear = linear
        self.factors = factors
        self.scale = scale
        self.merged = merged
        self.joint = joint

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in]; it contains the adapter if that is merged."""
        return self.linear.weight if self.merged is None else self.merged

    def __call__(self, x: torch.Tensor, dropout: float) -> torch.Tensor:
        """Compute the layer's output [N, out] for x [N, in]. `dropout` is the probability of
        dropout on the adapter's input; with 0 there is none. With dropout, weight and adapter are
        applied separately even if they are merged, because dropout acts on the adapter's input
        alone."""
        factors = self.factors
        if factors is None:
            return FrozenLinear.apply(x, self.linear.weight, self.linear.bias)
        use_merged = self.merged is not None and not dropout
        adapter_input = F.dropout(x, dropout) if dropout else x
        return LoraLinear.apply(
            x,
            adapter_input,
            factors.a,
            factors.b,
            self.weight if use_merged else self.linear.weight,  # `weight` is the merged one
            self.linear.bias,
            LoraPlacement(factors.spans, self.scale, merged=use_merged, joint=self.joint),
        )

    def apply_gated(
        self, gate_up: torch.Tensor, dropout: float, functions: LayerFunctions
    ) -> torch.Tensor:
        """Compute this layer's output [N, out] for the input silu(gate) * up, which is not kept in
        memory for the backward pass.

        Args:
            gate_up: [N, 2 * in], gate, then up.
            dropout: probability of dropout on the adapter's input; 0 for none.
            functions: the set that computes silu(gate) * up and its gradient.
        """
        factors = self.factors
        if factors is None or dropout:  # GatedLoraLinear knows neither case
            return self(SwiGLU.apply(gate_up, functions), dropout)
        is_merged = self.merged is not None
        return GatedLoraLinear.apply(
            gate_up,
            factors.a,
            factors.b,
            self.weight,
            self.linear.bias,
            LoraPlacement(factors.spans, self.scale, merged=is_merged, joint=self.joint),
            functions,
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute again what is derived from the adapter's weights, after they have changed: the
        sum weight + scale * B A in `merged`, and the parts of B in `joint`. Does nothing if the
        layer has neither, or no adapter."""
        factors = self.factors
        if factors is None:
            return
        # If one projection covers all outputs, `joint.b` is a view of the adapter's copy and has
        # the shape of `factors.b`: nothing is to be copied then.
        if self.joint is not None and self.joint.b.shape != factors.b.shape:
            fill_joint(self.joint.b, factors.b, factors.spans)
        if self.merged is not None:
            self.merged.copy_(self.linear.weight)
            for (start, stop), part in zip(factors.spans, factors.parts, strict=True):
                a, b = factors.a[part.a], factors.b[part.b]
                self.merged[start:stop].addmm_(b, a, alpha=self.scale)


LayerWeights = tuple[AdaptedLinear, AdaptedLinear, AdaptedLinear, AdaptedLinear]


class Weights:
    """A decoder's layers with an adapter on them, or without.

    What is derived from the adapter is computed once for each version of it. On a CPU in float32
    that is the sum of weight and adapter, if memory allows it. Otherwise it is the adapter in the
    layers' number format, as factors for one product per layer (low_rank.py).
    """

    def __init__(
        self, layers: Sequence[Layer], adapter: FlatAdapter | None = None, *, merge: bool = False
    ) -> None:
        """Put the adapter on each of the layers; with None the layers stay without one. What is
        derived from the adapter is allocated here and computed by `refresh`.

        Args:
            merge: keep weight + scale * B A beside the frozen weights. `refresh` computes it from
                the frozen weights whenever the adapter has changed, so that errors do not add up.
                Ignored unless the weights are float32: rounded to bfloat16, most of a small update
                would be lost.
        """
        weight = layers[0].qkv.weight
        is_float32 = weight.dtype == torch.float32
        self.adapter = adapter
        self.merging = merge and adapter is not None and is_float32
        self._version = -1  # of the adapter at the last refresh; -1: there was none
        self._adapter_copy: torch.Tensor | None = None  # all of the adapter in the weights' format
        if adapter is not None and not (is_float32 and weight.device.type == "cpu"):
            self._adapter_copy = torch.empty_like(adapter.flat, dtype=weight.dtype)
        self._layers = self._adapted_layers(layers)

    def _adapted_layers(self, layers: Sequence[Layer]) -> "list[LayerWeights]":
        """Wrap the four linear layers of each decoder layer, with their parts of the adapter.
        Returns one tuple for each decoder layer."""
        adapted_layers: list[LayerWeights] = []
        linear_index = 0  # counted through the whole decoder, as in the adapter
        for layer in layers:
            adapted = []
            for linear in layer.linears:
                adapted.append(self._adapted_linear(linear, linear_index))
                linear_index += 1
            qkv, o, gate_up, down = adapted
            adapted_layers.append((qkv, o, gate_up, down))
        return adapted_layers

    def _adapted_linear(self, linear: Linear, linear_index: int) -> AdaptedLinear:
        """Wrap a matrix of the decoder with its part of the adapter, if it has one. `linear_index`
        is the matrix's number among all matrices of the decoder. Allocates memory for what is
        derived from the adapter."""
        factors = self.adapter.factors[linear_index] if self.adapter is not None else None
        if self.adapter is None or factors is None:
            return AdaptedLinear(linear)
        joint = None
        if self._adapter_copy is not None:
            joint = _joint_factors(linear, factors, self._adapter_copy)
        return AdaptedLinear(
            linear,
            factors,
            # The factor that the model multiplies the layer's output by applies to the adapter too.
            scale=self.adapter.spec.scale * linear.factor,
            merged=torch.empty_like(linear.weight) if self.merging else None,
            joint=joint,
        )

    def layer(self, number: int) -> LayerWeights:
        """Return the four matrices, with the adapter on them, of the decoder layer with this number
        from 0: qkv, o, gate_up, down."""
        return self._layers[number]

    @torch.no_grad()
    def refresh(self) -> "Weights":
        """Compute again what is derived from the adapter's weights, if they have changed since the
        last time: their copy in the layers' number format, and the merged weights. Returns this
        object."""
        adapter = self.adapter
        if adapter is None or adapter.version == self._version:
            return self
        if self._adapter_copy is not None:
            self._adapter_copy.copy_(adapter.flat)
        if self.merging or self._adapter_copy is not None:
            for layer in self._layers:
                for linear in layer:
                    linear.refresh()
        self._version = adapter.version
        return self


def _joint_factors(linear: Linear, factors: Factors, adapter_copy: torch.Tensor) -> JointFactors:
    """Make the factors of a layer in the form for one product over all its projections, in the
    layer's number format. They are views of `adapter_copy`, which holds the whole adapter in that
    format. If the layer has several adapted projections, or one that does not cover all outputs, B
    gets memory of its own, which is zero until `AdaptedLinear.refresh` fills it."""

    def view_of(leaf: torch.Tensor) -> torch.Tensor:
        """View the part of `adapter_copy` that holds the factor `leaf`. The copy has the order of
        the adapter's flat buffer, of which `leaf` is a view."""
        offset = leaf.storage_offset()  # in the flat buffer
        return adapter_copy[offset : offset + leaf.numel()].view(leaf.shape)

    a, outputs = view_of(factors.a), linear.weight.shape[0]
    if factors.spans == ((0, outputs),):
        return JointFactors(a, view_of(factors.b))
    return JointFactors(a, adapter_copy.new_zeros(outputs, a.shape[0]))
