"""The computations that try each fast path: a few layers of the kind that is trained, with random
weights and seeded inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.worker.core import switched_off
from engine.worker.core.batch import Row, shared_prefix
from engine.worker.fast_paths.trial import PathUnavailable, Trial
from engine.worker.network.adapter import FlatAdapter, LoraSpec
from engine.worker.network.decoder import Decoder
from engine.worker.network.network import DecoderNetwork
from engine.worker.network.policy import pick_dtype
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.ops import flash3, fused_ops, matmul
from engine.worker.ops.attention import VARLEN_DTYPES, Attention
from engine.worker.ops.fused_ops import AS_WRITTEN, Choice, Sizes
from engine.worker.ops.packing import Layout
from engine.worker.update.optimizer import AdamW

VOCAB = 512
LORA = LoraSpec(rank=16, alpha=32, dropout=0.0, targets=("all-linear",))
# Relative differences that rounding explains, by number format: one operation, and a whole forward
# and backward pass of a few layers.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
PASS_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 3e-2}
STEPS = 20  # optimizer steps on the device, whose losses are compared with a CPU's
TRAINED_DIFFERENCE = 0.05  # largest relative difference of these losses: bfloat16 against float32
LEARNING_RATE = 1e-3
# For the trials of sampling. The stop id is beyond the vocabulary, so it is never sampled and all
# completions are full.
GREEDY_NEEDS = SamplerNeeds(pad_id=0, stop_ids=[VOCAB], decode=lambda _: "", max_rows=16)


@dataclass(frozen=True)
class Widths:
    """The sizes of the model that is tried. On a GPU they are larger, because a small model is too
    fast to be timed."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


WIDTHS = {
    "cpu": Widths(64, 192, 4, 2, 16, layers=2),
    "cuda": Widths(1024, 3072, 16, 8, 64, layers=4),
}
# Lengths of a group's prompt and completions, and how many completions there are.
GROUP = {"cpu": (192, 24, 6), "cuda": (512, 256, 8)}


def network_of(
    device: torch.device, *, fused: bool = False, widths: Widths | None = None
) -> DecoderNetwork:
    """Make a small decoder with seeded random weights on the device, in the number format that
    training uses there.

    Args:
        fused: use the functions that `fused_ops` chooses instead of torch's.
        widths: sizes of the decoder; None takes those for the device.
    """
    return DecoderNetwork(
        Decoder.from_transformers(model_of(device, widths or WIDTHS[device.type])),
        vocab=VOCAB,
        kernel_choice=_choice(device) if fused else AS_WRITTEN,
    )


def model_of(device: torch.device, widths: Widths) -> Qwen3ForCausalLM:
    """Make transformers' model with seeded random weights on the device, in the number format that
    training uses there."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=widths.hidden,
        intermediate_size=widths.intermediate,
        num_hidden_layers=widths.layers,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    # torch's `to`, because the type annotations of transformers' own `to` fit no call.
    torch.nn.Module.to(model, device, pick_dtype("auto", device))
    return model


def _choice(device: torch.device) -> Choice:
    """Choose the functions between the matrix products (norms, rotations, gates) for the small
    model, as a run on the device would."""
    widths = WIDTHS[device.type]
    sizes = Sizes(
        hidden=widths.hidden,
        intermediate=widths.intermediate,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        normed=True,
    )
    return fused_ops.choose(sizes, pick_dtype("auto", device), device)


def group_rows(device: torch.device) -> list[Row]:
    """Make rows as GRPO trains them: completions of different lengths that share one prompt. Their
    ids follow from their positions, so that every call makes the same rows."""
    prompt_length, completion_length, count = GROUP[device.type]
    prompt = [(7 * position) % (VOCAB - 1) + 1 for position in range(prompt_length)]
    rows = []
    for member in range(count):
        length = completion_length - member  # no two completions are equally long
        completion = [(11 * position + 13 * member) % (VOCAB - 1) + 1 for position in range(length)]
        mask = [0] * prompt_length + [1] * length
        rows.append(Row(prompt + completion, mask, prefix_len=shared_prefix(prompt_length)))
    return rows


def seeded_adapter(network: DecoderNetwork) -> FlatAdapter:
    """Make a new adapter and add seeded noise to all its weights, so that every gradient is tried:
    a new adapter's factors B are zero, and then its factors A get no gradient."""
    adapter = network.new_adapter(LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        adapter.flat.add_(
            0.02 * torch.randn(adapter.flat.shape, generator=generator).to(adapter.flat)
        )
    return adapter


def pass_through(
    network: DecoderNetwork, adapter: FlatAdapter, rows: Sequence[Row]
) -> list[torch.Tensor]:
    """Run the rows forward and backward. Returns [the log-probabilities of the trained tokens [T],
    the gradient of their mean with respect to all of the adapter's weights]."""
    adapter.clear_gradients()
    logprobs, _ = network.logprobs(network.collate(rows), adapter, training=True)
    logprobs.mean().backward()
    assert adapter.flat.grad is not None
    return [logprobs.detach(), adapter.flat.grad.clone()]


# --- one function for each path, which prepares what is computed ----------------------------------


def bfloat16(device: torch.device) -> Trial:
    """Try a product of bfloat16 matrices; the plain way multiplies the same numbers in float32."""
    size = 4096 if device.type == "cuda" else 256
    left_factor, right_factor = _random((2, size, size), device).to(torch.bfloat16)

    def plain() -> list[torch.Tensor]:
        """Multiply the same numbers in float32."""
        return [left_factor.float() @ right_factor.float()]

    def work() -> list[torch.Tensor]:
        """Multiply in bfloat16."""
        return [left_factor @ right_factor]

    return Trial(work, allowed=ROUNDING[torch.bfloat16], plain=plain)


def packed_attention(device: torch.device) -> Trial:
    """Try attention over the packed sequences of a group (completions of one prompt), with its
    gradient. The paths `varlen_attention` and `block_attention` are both tried by this work.

    The trial has no plain way of its own: `Attention` asks itself whether one of these paths is
    switched off, so the same work without the path is what it is compared with.

    Raises PathUnavailable if the kernel does not take the number format of this GPU.
    """
    widths = WIDTHS[device.type]
    prompt_length, completion_length, count = GROUP[device.type]
    # No two completions are equally long, as in `group_rows`.
    lengths = tuple(completion_length - member for member in range(count))
    layout = Layout((prompt_length,), lengths, owners=(0,) * count)
    dtype = pick_dtype("auto", device)
    if device.type == "cuda" and dtype not in VARLEN_DTYPES:
        raise PathUnavailable(f"the kernel takes no {dtype}")
    channels = (widths.heads + 2 * widths.kv_heads) * widths.head_dim
    qkv = _random((prompt_length + sum(lengths), channels), device).to(dtype).requires_grad_()

    def work() -> list[torch.Tensor]:
        """Compute the attention's output and the gradient of its mean square."""
        attention = Attention(layout, widths.heads, widths.kv_heads, device, dtype)
        out = attention(qkv)
        (gradient,) = torch.autograd.grad(out.float().square().mean(), qkv)
        return [out, gradient]

    return Trial(work, allowed=ROUNDING[dtype])


def flash_attention(device: torch.device) -> Trial:
    """Try torch's scaled_dot_product_attention on one causal batch, with its gradient; the plain
    way is torch's kernel of plain formulas."""
    widths = WIDTHS[device.type]
    dtype = pick_dtype("auto", device)
    # Queries, keys and values of 8 rows of 512 tokens.
    shape = (3, 8, widths.heads, 512, widths.head_dim)
    q, k, v = (part.requires_grad_() for part in _random(shape, device).to(dtype))

    def work() -> list[torch.Tensor]:
        """Compute the attention's output and the gradients of its mean square."""
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(out.float().square().mean(), (q, k, v))
        return [out, *gradients]

    def plain() -> list[torch.Tensor]:
        """Compute the same by plain formulas (torch's "math" kernel)."""
        with sdpa_kernel(SDPBackend.MATH):
            return work()

    return Trial(work, allowed=ROUNDING[dtype], plain=plain)


def flash_attention_3(device: torch.device) -> Trial:
    """Try attention over the packed sequences of a group by FlashAttention 3; the plain way is
    torch's own FlashAttention 2.

    Raises PathUnavailable if FlashAttention 3 is not installed, or this GPU is not a Hopper.
    """
    if why_not := flash3.why_not(device):
        raise PathUnavailable(why_not)
    packed = packed_attention(device)

    def work() -> Sequence[torch.Tensor]:
        """Compute the attention by FlashAttention 3, or by 2 if the path is switched off."""
        with flash3.in_use(wanted=not switched_off.is_off("flash_attention_3")):
            return packed.work()

    return Trial(work, allowed=packed.allowed)


def fused_kernels(device: torch.device) -> Trial:
    """Try a pass through a small model with the fused functions that a run would use; the plain way
    has torch's functions.

    Raises PathUnavailable if liger-kernel is not installed, RuntimeError if the fused functions
    cannot be used.
    """
    if find_spec("liger_kernel") is None:
        raise PathUnavailable("liger-kernel is not installed; the extra `gpu` has it")
    fused_network, plain_network = network_of(device, fused=True), network_of(device)
    if fused_network.kernels_why:
        raise RuntimeError(fused_network.kernels_why)
    rows = group_rows(device)
    return Trial(
        partial(pass_through, fused_network, seeded_adapter(fused_network), rows),
        allowed=PASS_ROUNDING[fused_network.dtype],
        plain=partial(pass_through, plain_network, seeded_adapter(plain_network), rows),
    )


def shared_prompt(device: torch.device) -> Trial:
    """Try a pass through a small model over a group whose prompt is run once; the plain way runs
    the prompt with each completion."""
    network = network_of(device)
    adapter = seeded_adapter(network)

    def work() -> list[torch.Tensor]:
        """Run the group forward and backward. The rows are made anew for each pass, because it is
        `group_rows` that asks whether the path is switched off."""
        return pass_through(network, adapter, group_rows(device))

    return Trial(work, allowed=PASS_ROUNDING[network.dtype])


def decode_graph(device: torch.device) -> Trial:
    """Try sampling with CUDA graphs: greedy completions of a few prompts, compared by ids and
    log-probabilities."""
    network = network_of(device)
    adapter = seeded_adapter(network)

    def work() -> list[torch.Tensor]:
        """Sample the completions; the sampler looks whether CUDA graphs are switched off."""
        sampler = network.sampler(GREEDY_NEEDS)
        sampler.load(adapter)
        return _greedy(sampler)

    return Trial(work, allowed=ROUNDING[network.dtype])


def transformers_graph(device: torch.device) -> Trial:
    """Try sampling through transformers with CUDA graphs: greedy completions of a few prompts,
    compared by ids and log-probabilities. The plain way launches each operation by itself.

    Raises RuntimeError if no step can be captured.
    """
    # Importing PEFT takes a second and a hundred megabytes, and no other trial needs it.
    from engine.worker.network.hub_network import HubNetwork  # noqa: PLC0415

    def sampler() -> Sampler:
        """Make a sampler on a model of its own, with an adapter."""
        network = HubNetwork(model_of(device, WIDTHS[device.type]), VOCAB, why="it is tried")
        made = network.sampler(GREEDY_NEEDS)
        if network.capture_why:
            raise RuntimeError(network.capture_why)
        made.load(network.new_adapter(LORA, seed=0))
        return made

    with switched_off.without("transformers_graph"):
        plain = sampler()
    return Trial(
        partial(_greedy, sampler()),
        allowed=ROUNDING[pick_dtype("auto", device)],
        plain=partial(_greedy, plain),
    )


def _greedy(sampler: Sampler) -> list[torch.Tensor]:
    """Sample the likeliest completions of a few prompts. Returns [their ids, their
    log-probabilities], each [prompts, tokens]."""
    prompts = [
        [(5 * position + prompt) % (VOCAB - 1) + 1 for position in range(32)] for prompt in range(4)
    ]
    params = SamplingParams(max_tokens=32, temperature=0.0)
    completions = [group[0] for group in sampler.generate(prompts, n=1, params=params)]
    ids = torch.tensor([completion.ids for completion in completions])
    return [ids, torch.tensor([completion.logprobs for completion in completions])]


def float32_head(device: torch.device) -> Trial:
    """Try the logits of a bfloat16 output layer computed straight to float32; the plain way rounds
    them to bfloat16 first."""
    x = _random((256, 1024), device).to(torch.bfloat16)
    weight = _random((8192, 1024), device).to(torch.bfloat16)

    def work() -> list[torch.Tensor]:
        """Compute the logits; `float_logits` asks whether the path is switched off."""
        return [matmul.OutputLayer(weight).float_logits(x)]

    return Trial(work, allowed=ROUNDING[torch.bfloat16])


def onednn_products(device: torch.device) -> Trial:
    """Try float32 products through oneDNN, as the layers of a frozen base compute them; the plain
    way is torch's own product.

    Raises PathUnavailable if oneDNN is not faster on this processor or is missing.
    """
    if not matmul.has_onednn():
        raise PathUnavailable(
            "oneDNN is no faster on this processor, or this torch is built without it"
        )
    x, weight = _random((512, 1024), device), _random((2048, 1024), device)

    def work() -> list[torch.Tensor]:
        """Multiply by a weight that is used many times, and by one that is used once. Both ask
        whether oneDNN is switched off."""
        return [matmul.FixedWeight(weight, pack=False)(x), matmul.linear(x, weight)]

    return Trial(work, allowed=ROUNDING[torch.float32])


def four_bits(device: torch.device) -> Trial:
    """Try a product with a weight in 4 bits; the plain way unpacks the same weight to float32.

    Raises PathUnavailable if bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise PathUnavailable("bitsandbytes is not installed")
    # Imported by name, because most machines lack the package.
    functional = import_module("bitsandbytes.functional")
    nn = import_module("bitsandbytes.nn")
    dense = torch.nn.Linear(1024, 512, bias=False)
    packed = nn.Linear4bit(1024, 512, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    packed.load_state_dict(dense.state_dict())
    packed = packed.to(device)  # moving the layer to a device packs its weight
    x = _random((64, 1024), device).to(torch.bfloat16)

    def plain() -> list[torch.Tensor]:
        """Unpack the weight and multiply in float32."""
        weight = functional.dequantize_4bit(packed.weight.data, packed.weight.quant_state)
        return [F.linear(x.float(), weight.float())]

    def work() -> list[torch.Tensor]:
        """Multiply by the packed weight."""
        return [packed(x)]

    return Trial(work, allowed=ROUNDING[torch.bfloat16], plain=plain)


def training(device: torch.device) -> Trial:
    """Try optimizer steps of a small model on this device; their losses are compared with those on
    the CPU."""
    cpu = torch.device("cpu")
    rows = group_rows(cpu)

    def losses_on(device_used: torch.device) -> list[torch.Tensor]:
        """Return the losses of a few optimizer steps on this device, one tensor [steps]."""
        network = _cpu_sized_network(device_used)
        adapter = network.new_adapter(LORA, seed=0)
        optimizer = AdamW(adapter.parameters(), LEARNING_RATE, weight_decay=0.0)
        losses = []
        for _ in range(STEPS):
            adapter.clear_gradients()
            logprobs, _ = network.logprobs(network.collate(rows), adapter, training=True)
            loss = -logprobs.mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [torch.tensor(losses)]

    return Trial(
        work=partial(losses_on, device), allowed=TRAINED_DIFFERENCE, plain=partial(losses_on, cpu)
    )


def _cpu_sized_network(device: torch.device) -> DecoderNetwork:
    """Make the small model with the sizes of the CPU's trials on any device, so that a GPU and the
    CPU train the same weights."""
    return network_of(device, widths=WIDTHS["cpu"])


def _random(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Draw a float32 tensor of this shape from the standard normal distribution, by a fixed seed.
    It is drawn on the CPU and copied to the device, so that it is the same for every device."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(tuple(shape), generator=generator).to(device)


TRIALS: Mapping[str, Callable[[torch.device], Trial]] = {
    "bfloat16": bfloat16,
    "varlen_attention": packed_attention,
    "flash_attention": flash_attention,
    "flash_attention_3": flash_attention_3,
    "fused_kernels": fused_kernels,
    "decode_graph": decode_graph,
    "transformers_graph": transformers_graph,
    "float32_head": float32_head,
    "shared_prompt": shared_prompt,
    "onednn_products": onednn_products,
    "block_attention": packed_attention,
    "four_bits": four_bits,
    "training": training,
}
