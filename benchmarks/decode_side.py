"""Sampling alone: `python -m benchmarks.decode_side JSON`, in a process of its own.

Loads a model as a run does and samples completions of random prompts, through our own sampler or a
vLLM server; both warm up once. Prints one JSON object: tokens, seconds, the peak of memory, and the
bandwidth of a GPU.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.worker.core.runtime import prepare

prepare()

import torch

from benchmarks.gpu_copy import copy_bandwidth
from engine.home.run_dir import Home
from engine.machine.install import vllm_env
from engine.machine.processes.vllm_process import Plan, VllmProcess
from engine.worker.components import quiet_libraries, set_threads
from engine.worker.network.adapter import LoraSpec
from engine.worker.network.policy import Base, load_base, pick_device
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.rollouts.samplers import cpu_threads
from engine.worker.rollouts.vllm_sampler import VllmSampler
from engine.worker.update.meter import peak_memory

RANK, ALPHA = 16, 32
VLLM_SHARE = 0.6  # of the GPU; the trainer's copy of the weights lies beside it


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure what `asked` says: model, device, sampler, prompts, group, prompt_tokens,
    new_tokens."""
    quiet_libraries()
    set_threads()
    device = pick_device(asked["device"])
    base = load_base(Path(asked["model"]), device, "auto")
    with tempfile.TemporaryDirectory(prefix="decode-") as folder:
        sampler = make_sampler(asked, base, Path(folder))
        try:
            return timed(asked, base, sampler)
        finally:
            sampler.close()


def make_sampler(asked: dict[str, Any], base: Base, folder: Path) -> Sampler:
    """The sampler that is measured. No id ends a completion, so that all have full length."""
    rows = asked["prompts"] * asked["group"]
    if asked["sampler"] != "vllm":
        return base.network.sampler(SamplerNeeds(0, [-1], lambda _: "", max_rows=rows))
    on_gpu = base.network.device.type == "cuda"
    plan = Plan(
        python=vllm_env.require_python(Home.locate()),
        model=base.path,
        device="cuda" if on_gpu else "cpu",
        dtype=str(base.network.dtype).removeprefix("torch."),
        max_length=asked["prompt_tokens"] + asked["new_tokens"],
        rows=rows,
        lora_rank=RANK,
        memory=VLLM_SHARE if on_gpu else float(2**30),
        threads=cpu_threads(),
    )
    process = VllmProcess(plan, folder / "vllm.log")
    vocab = base.network.shape.vocab
    return VllmSampler(
        process, folder=folder / "adapters", stop_ids=[], vocab=vocab, model_vocab=vocab
    )


def timed(asked: dict[str, Any], base: Base, sampler: Sampler) -> dict[str, Any]:
    """Sample twice with an adapter, and time the second."""
    adapter = base.network.new_adapter(LoraSpec(RANK, ALPHA, 0.0, ("all-linear",)), seed=0)
    sampler.load(adapter)
    generator = torch.Generator().manual_seed(0)
    shape = (asked["prompts"], asked["prompt_tokens"])
    prompts = torch.randint(3, base.vocab, shape, generator=generator).tolist()
    took = 0.0
    groups: list[Any] = []
    for seed in (0, 1):
        began = time.perf_counter()
        params = SamplingParams(asked["new_tokens"], 1.0, seed=seed)
        groups = sampler.generate(prompts, asked["group"], params)
        took = time.perf_counter() - began
    tokens = sum(len(one.ids) for group in groups for one in group)
    device = base.network.device
    return {
        "tokens": tokens,
        "seconds": took,
        "peak_bytes": peak_memory(device),
        "bytes_per_s": copy_bandwidth() if device.type == "cuda" else 0.0,
    }


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    json.dump(main(json.loads(sys.argv[1])), sys.stdout)
