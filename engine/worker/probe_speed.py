"""Measures how fast this machine is: `python -P -m engine.worker.probe_speed OUT.json`.

It times the work that a run consists of, on a small random model of the kind that is trained here,
and writes rates that the estimator can scale to other sizes. Training and decoding are each timed
at two sizes, to separate the cost of an operation from the fixed cost of a pass. This takes about
ten seconds on two cores.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

BEGAN = time.monotonic()  # before the heavy imports, which are part of a start

from engine.worker.core.runtime import prepare

prepare()

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.core.files import write_json
from engine.worker.components import set_threads
from engine.worker.core.batch import Row
from engine.worker.network.adapter import Adapter, LoraSpec
from engine.worker.network.decoder import Decoder
from engine.worker.network.network import DecoderNetwork
from engine.worker.network.policy import pick_device, pick_dtype
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.ops.packing import Packed

# A measurement: (how many tokens or completions the work had, how many seconds it took).
Timing = tuple[float, float]

LORA = LoraSpec(rank=16, alpha=32, dropout=0.0, targets=("all-linear",))
VOCAB = 1024
LAYERS = 4
TRAINED_ROWS = {"cpu": 12, "cuda": 64}  # rows of the larger batch; the smaller has a single row
# Completions at once, in the larger and in the smaller measurement of decoding.
COMPLETIONS = {"cpu": (96, 8), "cuda": (256, 8)}
DECODED_STEPS = 16  # decoding steps that are timed
# The first tokens, whose time is subtracted: reading the prompt makes one, and on a GPU the next
# step captures a CUDA graph.
UNTIMED_TOKENS = {"cpu": 1, "cuda": 2}
# The sizes of the timed model. On a GPU it is as wide as a 4B model, because a narrow one would
# measure how fast kernels are launched instead of how fast they compute.
SIZES = {
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "cuda": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
FIXED_SHARE = 0.1  # the fixed cost is at least this share of the smaller measurement


def small_model(device: torch.device) -> Qwen3ForCausalLM:
    """Make a small Qwen3 with random weights on the device, in the number format that training
    would use there."""
    sizes = SIZES[device.type]
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        eos_token_id=None,
        pad_token_id=0,
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
    )
    model = Qwen3ForCausalLM(config)
    # Called through torch, because the annotations of transformers' own `to` reject this call.
    torch.nn.Module.to(model, device, pick_dtype("auto", device))
    return model


def multiplied_weights(model: torch.nn.Module) -> int:
    """Count the weights that take part in matrix products: all but the embedding, which is looked
    up."""
    return sum(weight.numel() for name, weight in model.named_parameters() if "embed" not in name)


def measure(device: torch.device) -> dict[str, float]:
    """Time training and decoding of a small model on the device.

    Returns:
        train_flops, sample_flops: operations per second of training and of decoding.
        update_s, decode_step_s: the fixed seconds of one training pass and of one decoding step,
            whatever their sizes.
        layers: the number of layers of the timed model; the fixed costs grow with it.
    """
    model = small_model(device)
    weights = multiplied_weights(model)
    # The network has one id less than the model, so that `time_decoding` can use the last id as an
    # end token that is never sampled.
    network = DecoderNetwork(Decoder.from_transformers(model), vocab=VOCAB - 1)
    adapter = network.new_adapter(LORA, seed=0)
    # Operations per token and weight: 2 forward, 2 more for the gradient of the inputs; the frozen
    # weights need none of their own. Decoding goes forward only.
    train_flops, update_s = rate_and_fixed_cost(4 * weights, *time_training(network, adapter))
    sample_flops, step_s = rate_and_fixed_cost(2 * weights, *time_decoding(network, adapter))
    return {
        "train_flops": train_flops,
        "update_s": update_s,
        "sample_flops": sample_flops,
        "decode_step_s": step_s,
        "layers": LAYERS,
    }


def time_training(network: DecoderNetwork, adapter: Adapter) -> tuple[Timing, Timing]:
    """Time a training pass of the network over a single row and one over many. Returns (tokens,
    seconds) of each, the smaller pass first."""
    # A row of 128 tokens. All are trained except the first, which nothing predicts.
    row = Row(ids=list(range(1, 129)), loss_mask=[0] + [1] * 127)
    large_batch = network.collate([row] * TRAINED_ROWS[network.device.type])
    small_batch = network.collate([row])

    def train(batch: Packed) -> None:
        """Do one forward and backward pass."""
        logprobs, _ = network.logprobs(batch, adapter, training=True)
        logprobs.sum().backward()

    large_s = best_of(lambda: train(large_batch), network.device)
    small_s = best_of(lambda: train(small_batch), network.device)
    return (small_batch.ids.numel(), small_s), (large_batch.ids.numel(), large_s)


def time_decoding(network: DecoderNetwork, adapter: Adapter) -> tuple[Timing, Timing]:
    """Time a decoding step of the network with few parallel completions and one with many.

    Returns (completions, seconds) of each, the smaller step first.
    """
    # The stop id is never sampled, because the network has one id less. No text is needed, so
    # `decode` returns none.
    sampler = network.sampler(
        SamplerNeeds(pad_id=0, stop_ids=[VOCAB - 1], decode=lambda _: "", max_rows=256)
    )
    sampler.load(adapter)
    many, few = COMPLETIONS[network.device.type]
    many_s = _decoding_step_s(sampler, many, network.device)
    few_s = _decoding_step_s(sampler, few, network.device)
    return (few, few_s), (many, many_s)


def _decoding_step_s(sampler: Sampler, completions: int, device: torch.device) -> float:
    """Return the seconds of one decoding step with this number of parallel completions, without the
    time for the prompt and the first token."""
    prompt = list(range(1, 65))  # any 64 ids

    def sample(tokens: int) -> None:
        """Sample this many tokens for each completion."""
        params = SamplingParams(max_tokens=tokens, temperature=1.0)
        sampler.generate([prompt], completions, params)

    untimed = UNTIMED_TOKENS[device.type]
    first_s = best_of(lambda: sample(tokens=untimed), device)
    all_s = best_of(lambda: sample(tokens=untimed + DECODED_STEPS), device)
    return (all_s - first_s) / DECODED_STEPS


def rate_and_fixed_cost(operations: float, smaller: Timing, larger: Timing) -> tuple[float, float]:
    """Split the time of some work into a fixed part and a part that grows with its size.

    `smaller` and `larger` are two measurements (units of work, seconds); a unit takes `operations`
    operations. The line through both points gives the seconds per unit (its slope) and the fixed
    seconds (its value at zero units).

    Returns (operations per second, fixed seconds). The fixed part is at least FIXED_SHARE of the
    smaller measurement. If the larger one took no longer, all of its time counts as operations.
    """
    few, few_s = smaller
    many, many_s = larger
    unit_s = (many_s - few_s) / (many - few)
    least_fixed_s = FIXED_SHARE * few_s
    if unit_s <= 0:
        return operations * many / many_s, least_fixed_s
    fixed_s = few_s - unit_s * few
    return operations / unit_s, max(least_fixed_s, fixed_s)


def best_of(work: Callable[[], None], device: torch.device, times: int = 2) -> float:
    """Return the seconds of the fastest of `times` calls of `work`, which other processes disturbed
    least.

    One more call comes first as a warm-up and is not counted.
    """
    seconds = []
    for _ in range(times + 1):
        if device.type == "cuda":  # a GPU works in the background, so wait until it is idle
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    _warm_up_s, *timed_s = seconds
    return min(timed_s)


def main(out: Path) -> None:
    """Measure this machine and write a JSON file to `out`: the rates and fixed costs of training
    and decoding (see `measure`), the seconds that a worker takes to start, and on what this was
    measured."""
    startup_s = time.monotonic() - BEGAN
    set_threads()
    device = pick_device(os.environ.get("HONESMITH_DEVICE", "cpu"))
    out.parent.mkdir(parents=True, exist_ok=True)
    rates = measure(device)
    facts = {
        "startup_s": startup_s,
        "device": device.type,
        "name": os.environ.get("HONESMITH_DEVICE_NAME", ""),
        "time": time.time(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    write_json(out, rates | facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
