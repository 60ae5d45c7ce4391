"""How fast this machine is: `python -P -m engine.worker.probe_speed OUT.json`.

Times the work a run is made of, on a small random model of the kind that is trained here, and
writes rates the estimator can scale: achieved FLOP/s forward + backward through an adapter,
achieved FLOP/s of prefill, seconds per decoding step and its part per layer, start-up seconds.
About ten seconds on two cores.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

BEGAN = time.monotonic()

from engine.worker.runtime import prepare

prepare()

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.files import write_json
from engine.worker.adapter import LoraSpec
from engine.worker.batch import Row
from engine.worker.decoder import Decoder
from engine.worker.network import DecoderNetwork, SamplerNeeds
from engine.worker.policy import pick_device, pick_dtype
from engine.worker.sampler import SamplingParams
from engine.worker.workbench import set_threads

LORA = LoraSpec(16, 32, 0.0, ("all-linear",))
VOCAB = 1024


def small_model(device: torch.device) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    torch.nn.Module.to(model, device, pick_dtype("auto", device))
    return model


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)


def measure(device: torch.device) -> dict[str, float]:
    """Rates of this machine; see the module."""
    model = small_model(device)
    weights = parameters(model)
    network = DecoderNetwork(Decoder.of(model), VOCAB - 1)
    adapter = network.new_adapter(LORA, seed=0)
    rows = [Row(list(range(1, 129)), [0] + [1] * 127) for _ in range(16)]
    batch = network.collate(rows)

    def train() -> None:
        network.logprobs(batch, adapter, training=True)[0].sum().backward()

    sampler = network.sampler(SamplerNeeds(0, [VOCAB - 1], lambda _: "", 256))
    sampler.load(adapter)
    prompts = [list(range(1, 65)) for _ in range(32)]

    def sample(steps: int) -> None:
        sampler.generate(prompts, 1, SamplingParams(steps, 1.0))

    train_s = best_of(train, device)
    prefill_s = best_of(lambda: sample(1), device)
    decode_s = (best_of(lambda: sample(17), device) - prefill_s) / 16
    tokens = batch.ids.numel()
    return {
        "train_flops": 4 * weights * tokens / train_s,
        "prefill_flops": 2 * weights * 32 * 64 / prefill_s,
        "decode_step_s": decode_s,
        "decode_layers": 4,
        "decode_rows": 32,
        "decode_flops": 2 * weights * 32 / decode_s,
    }


def best_of(work: Callable[[], None], device: torch.device, times: int = 2) -> float:
    """Least seconds of a few runs: what the machine can do when left alone."""
    seconds = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def main(out: Path) -> None:
    startup = time.monotonic() - BEGAN
    set_threads()
    device = pick_device(os.environ.get("HONESMITH_DEVICE", "cpu"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        out,
        measure(device)
        | {"startup_s": startup, "device": device.type, "time": time.time()}
        | {"threads": torch.get_num_threads(), "torch": torch.__version__},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
