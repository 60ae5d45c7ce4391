"""TRL beside ours: the peer's own trainers on the same model, rows, order and starting adapter.

    .bench/venv/bin/python -m benchmarks.trl_side

Reads one JSON request a line from standard input and answers each with one JSON line. Libraries are
imported once; every request is served by a fork of this process, so each has fresh memory and its
peak (VmHWM) is its own.

What is measured where: a step's time is between two `on_step_end` callbacks, data loading and
logging included, like ours; the first and the last step are left out. Processor time is the
process's own. The reward is the environment's own function, called on the same text. Gradient
checkpointing is off.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# As the worker does for itself: without it the peer would fall into the spinning trap.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TRL_EXPERIMENTAL_SILENCE="1",
)
warnings.filterwarnings("ignore")

import peft
import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.cases import PEER_LORA
from benchmarks.gpu_copy import copy_bandwidth
from benchmarks.processes import peak_bytes

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Clock(TrainerCallback):
    """When each optimizer step ended, by the wall and by the processor, and its loss."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._mark()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))

    def _mark(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def common(asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trainer arguments both algorithms share."""
    cuda = asked.get("device") == "cuda"
    return {
        "output_dir": folder,
        "learning_rate": asked["learning_rate"],
        "lr_scheduler_type": asked["lr_schedule"],
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": bool(asked.get("checkpointing")),
        "bf16": cuda,
        "use_cpu": not cuda,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": cuda,
        "seed": asked["seed"],
    }


def load(asked: dict[str, Any]) -> tuple[Any, Any]:
    cuda = asked.get("device") == "cuda"
    model = AutoModelForCausalLM.from_pretrained(
        asked["model"],
        dtype=torch.bfloat16 if cuda else torch.float32,
        attn_implementation=asked.get("attention") or "sdpa",
    )
    return model, AutoTokenizer.from_pretrained(asked["model"])


def start_alike(trainer: Any, asked: dict[str, Any]) -> None:
    """Give the peer the adapter ours starts from, and the learning rates of our steps."""
    trainer.remove_callback(PrinterCallback)
    if trainer.model.is_activation_checkpointing != bool(asked.get("checkpointing")):
        raise ValueError("the peer recomputes activations, or does not, against what was asked")
    if asked.get("start"):
        state = load_file(asked["start"])
        left = set_peft_model_state_dict(trainer.model, state)
        if getattr(left, "unexpected_keys", None):
            raise ValueError(f"adapter names differ: {left.unexpected_keys[:3]}")
    rates = asked.get("rates")
    if rates:

        def scheduled(num_training_steps: int, optimizer: Any = None) -> Any:
            peak = asked["learning_rate"]
            trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or trainer.optimizer, lambda k: rates[min(k, len(rates) - 1)] / peak
            )
            return trainer.lr_scheduler

        trainer.create_scheduler = scheduled


def sft_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the trainer: token ids where they are given, else a prompt and a completion."""
    if "ids" in row:
        labels = [i if on else -100 for i, on in zip(row["ids"], row["loss_mask"], strict=True)]
        return {"input_ids": row["ids"], "labels": labels}
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


def train_sft(asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """One SFT run of the variant asked for."""
    model, tokenizer = load(asked)
    rows = [sft_row(row) for row in asked["rows"]]
    variant = asked["variant"]
    packed = variant == "packed"
    batch = max(1, asked["packed_tokens"] // asked["max_length"]) if packed else asked["prompts"]
    config = SFTConfig(
        **common(asked, folder),
        per_device_train_batch_size=batch,
        max_steps=asked["steps"],
        max_length=asked["max_length"],
        packing=packed,
        train_sampling_strategy="group_by_length" if variant == "by_length" else "sequential",
    )
    clock = Clock(asked.get("device") == "cuda")
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
        peft_config=LoraConfig(**PEER_LORA),
    )
    start_alike(trainer, asked)
    sizes: list[int] = []
    collate = trainer.data_collator

    def counting(examples: list[dict[str, Any]]) -> Any:
        sizes.append(sum(len(example["input_ids"]) for example in examples))
        return collate(examples)

    trainer.data_collator = counting
    trainer.train()
    measured = sizes[1 : len(clock.wall) - 2]
    return steps(clock) | {
        "tokens": sum(measured),
        "all_tokens": sum(sizes[: len(clock.wall) - 1]),  # the loader reads ahead
        "losses": clock.losses,
        "same_batches": variant == "padded",
    }


def grpo_row(row: dict[str, Any]) -> dict[str, Any]:
    """A prompt for the trainer: as text where it is rendered already, else as messages."""
    prompt = row["text"] if "text" in row else row["messages"][:1]
    return {"prompt": prompt, "task": row.get("task", "")}


def reward_of(asked: dict[str, Any]) -> Any:
    """What the trainer calls: completions in, rewards out, computed by the environment's code."""
    spec = importlib.util.spec_from_file_location("bench_environment", asked["environment"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "pay"):
        return lambda completions, **_: [module.pay(text_of(said)) for said in completions]
    environment = module.load_environment()
    tasks = {each.id: each for each in environment.tasks()}

    def pay(completions: list[Any], task: list[str], **_: Any) -> list[float]:
        return [
            environment.score(tasks[each], text_of(said)).reward
            for each, said in zip(task, completions, strict=True)
        ]

    return pay


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


# Sampling through vLLM on the same GPU, which sleeps while the policy is trained.
VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enable_sleep_mode": True,
    "vllm_gpu_memory_utilization": 0.5,
}


def train_grpo(asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """One GRPO run: on-policy, no KL term, the trainer's own generation."""
    model, tokenizer = load(asked)
    rows = [grpo_row(row) for row in asked["rows"]]
    parts = asked.get("accumulate", 1)
    config = GRPOConfig(
        **common(asked, folder),
        **(VLLM if asked["variant"] == "vllm" else {}),
        per_device_train_batch_size=asked["prompts"] * asked["group"] // parts,
        gradient_accumulation_steps=parts,
        num_generations=asked["group"],
        max_completion_length=asked["new_tokens"],
        max_steps=asked["steps"],
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",
        epsilon_high=0.28,
        shuffle_dataset=False,
        cache_implementation="static" if asked["variant"] == "static" else None,
    )
    clock = Clock(asked.get("device") == "cuda")
    spent = {"sample_s": 0.0, "rollout_s": 0.0}

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            out = super()._generate_single_turn(*given, **named)
            spent["sample_s"] += time.perf_counter() - began
            return out

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            out = super()._generate_and_score_completions(inputs)
            spent["rollout_s"] += time.perf_counter() - began
            return out

    trainer = Timed(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward_of(asked),
        processing_class=tokenizer,
        callbacks=[clock],
        peft_config=LoraConfig(**PEER_LORA),
    )
    start_alike(trainer, asked)
    trainer.train()
    return steps(clock) | {
        "losses": clock.losses,
        "rewards": clock.rewards,
        "sample_s": spent["sample_s"] / asked["steps"],
        "train_s": (clock.wall[-1] - clock.wall[0] - spent["rollout_s"]) / asked["steps"],
        "same_batches": False,  # each samples completions of its own
    }


def steps(clock: Clock) -> dict[str, Any]:
    """Seconds and processor seconds of the steps between the first and the last."""
    wall, cpu = clock.wall, clock.cpu
    return {
        "steps": len(wall) - 3,
        "seconds": wall[-2] - wall[1],
        "cpu_s": cpu[-2] - cpu[1],
    }


def matmul(asked: dict[str, Any]) -> dict[str, Any]:
    """The matrix rates of this machine at a model's own shapes, GFLOP/s, and per processor second.

    Each linear layer's product, forward and to the activations, over as many rows as a batch has
    tokens: what the frozen part of a step would take if nothing else were done. Best of several,
    and on a CPU of torch's two libraries: MKL keeps to AVX2 on processors that are not Intel's.
    `torch` holds the rates of `torch.matmul` alone.
    """
    device = torch.device(asked.get("device") or "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    repeat = asked.get("repeat", 1)
    work = 0.0
    fastest, torch_alone = Spent(), Spent()
    for inputs, outputs in asked["matrices"]:
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        forward = torch.randn(asked["tokens"], inputs, device=device, dtype=dtype)
        backward = torch.randn(asked["tokens"], outputs, device=device, dtype=dtype)
        for left, right in ((forward, weight.t()), (backward, weight)):
            best_times = []
            for product in products(device):
                times = []
                until = time.perf_counter() + asked["seconds"]
                while time.perf_counter() < until or len(times) < 3:
                    began, spent = time.perf_counter(), time.process_time()
                    for _ in range(repeat):
                        product(left, right)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    times.append((time.perf_counter() - began, time.process_time() - spent))
                walls, cpus = zip(*times, strict=True)
                best_times.append(Spent(min(walls) / repeat, min(cpus) / repeat))
            work += 2.0 * asked["tokens"] * inputs * outputs
            torch_alone += best_times[0]
            fastest += min(best_times, key=lambda spent: spent.wall)
    return fastest.rates(work) | {"torch": torch_alone.rates(work)}


@dataclass(frozen=True)
class Spent:
    """Seconds by the wall and of the processor."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def rates(self, operations: float) -> dict[str, Any]:
        """GFLOP/s of so many operations, by the wall and of the processor."""
        return {"gflops": operations / self.wall / 1e9, "gflops_cpu": operations / self.cpu / 1e9}


def products(device: torch.device) -> list[Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Ways to multiply two matrices here: torch's own, and on a CPU oneDNN's where it is built."""
    ways: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [torch.matmul]
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if device.type == "cpu" and operator is not None:
        ways.append(lambda left, right: operator(left, right.t(), None, "none", [], ""))
    return ways


KINDS = {"sft": train_sft, "grpo": train_grpo}


def serve_one(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer one request, in a process of its own."""
    if asked.get("cores"):
        os.sched_setaffinity(0, asked["cores"])
        torch.set_num_threads(len(asked["cores"]))
    if asked["do"] == "matmul":
        return matmul(asked)
    if asked["do"] == "bandwidth":
        return {"bytes_per_s": copy_bandwidth()}
    torch.manual_seed(asked["seed"])
    answer = KINDS[asked["do"]](asked, asked["scratch"])
    answer["rss_mb"] = peak_bytes(os.getpid()) / 2**20
    if asked.get("device") == "cuda":
        answer["device_mb"] = torch.cuda.max_memory_reserved() / 2**20
    return answer


def answer_in_fork(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer, or {"error": ...} with the traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = serve_one(asked)
        except BaseException:  # noqa: BLE001 - the top of a process: the parent is told all
            answer = {"error": traceback.format_exc()[-4000:]}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reply = pipe.read()
    os.waitpid(child, 0)
    return json.loads(reply) if reply else {"error": "the process died without a word"}


def vllm_version() -> str:
    """The version of vLLM in this environment; "" without one."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    # Standard output is for answers alone; what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    versions = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "vllm": vllm_version(),
    }
    answers.write(json.dumps(versions) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer_in_fork(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
