"""What `make bench` measures: shapes, cases and the ratios that are asked for. No torch.

A case trains one model on one set of rows, ours and the peer's variants in turns. All of it is made
here from seeds; nothing is downloaded, but for the cases of a real model, which comes from the
package index and runs only where it is asked for by name.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

RANK, ALPHA = 16, 32
# The same adapter as PEFT's LoraConfig takes it.
PEER_LORA = {
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": "all-linear",
    "lora_dropout": 0.0,
    "task_type": "CAUSAL_LM",
}
TWO_THREADS = 0.65  # of a ratio is asked for at two threads
MATMUL_SHARE = 0.85  # of the fp32 matrix rate stands in for a ratio that arithmetic forbids
MEMORY_SHARE = 0.5  # of the padded peer's peak memory, where a case asks for no other
LOSS_TOLERANCE = 0.01


@dataclass(frozen=True)
class Shape:
    """A Qwen3-style decoder: per-head norms of queries and keys, tied head, no biases.

    Attributes:
        tied: whether the head is the embedding.
        known: the name by which `honesmith models add` fetches a model with real weights, whose
            heads have no norms; "" for random weights.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    context: int = 4096
    known: str = ""
    tied: bool = True


SHAPES: dict[str, Shape] = {
    "tiny": Shape(128, 4, 4, 2, 32, 384, 2048),
    "small": Shape(512, 8, 8, 4, 64, 1536, 2048),
    "wide": Shape(128, 4, 4, 2, 32, 384, 32_768),  # tiny with a real model's vocabulary
    "smollm2": Shape(576, 30, 9, 3, 64, 1536, 49_152, 8192, known="smollm2"),
    # Qwen3's own sizes, for GPU machines.
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936),
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151_936),
    "8b": Shape(4096, 36, 32, 8, 128, 12_288, 151_936, tied=False),
}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        steps: optimizer steps of one run; the first and the last are not measured.
        rows: train rows there are; sorting by length and packing choose among all of them.
        variants: settings of the peer, and how many rounds each takes part in (0: all of them).
        targets: what our throughput must be in multiples of a variant's; "best" is the variant
            with the highest throughput.
        algorithm: "sft", "grpo", or "decode": sampling alone, without a peer.
        prompts: SFT, conversations per step; GRPO, tasks per step.
        words: median words of a prompt (GRPO); its tokens (decode).
        memory: what our peak memory may be at most, as a share of the padded peer's.
        matmul: share of the matrix rate that is asked for beside the ratios; 0 for none.
    """

    name: str
    algorithm: str
    shape: str
    steps: int
    variants: Mapping[str, int]
    targets: Mapping[str, float]
    rows: int
    prompts: int = 8
    group: int = 8
    new_tokens: int = 48
    words: int = 40
    learning_rate: float = 2e-4
    max_length: int = 512
    seed: int = 0
    memory: float = MEMORY_SHARE
    matmul: float = 0.0

    @property
    def step_tokens(self) -> int:
        """Tokens of the completions of one step, each at its full length."""
        return self.prompts * self.group * self.new_tokens

    @property
    def padded(self) -> str:
        """The peer's default, which memory is held against."""
        return next(iter(self.variants))


@dataclass(frozen=True)
class Job:
    """A case on a number of threads."""

    case: Case
    threads: int

    @property
    def name(self) -> str:
        return f"{self.case.name}@{self.threads}"

    def target(self, variant: str) -> float:
        """The ratio asked for; 0 where none is."""
        asked = self.case.targets.get(variant, 0.0)
        return round(asked * TWO_THREADS, 3) if self.threads == 2 else asked


def _named(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


def _grpo(
    shape: str,
    steps: int,
    target: float,
    *,
    suffix: str = "",
    words: int = 48,
    variants: Mapping[str, int] | None = None,
) -> Case:
    """GRPO on a CPU: four tasks a step, as many rows as the steps take."""
    return Case(
        f"grpo-{suffix or shape}",
        "grpo",
        shape,
        steps,
        variants or {"dynamic": 0},
        {"dynamic": target},
        rows=4 * steps,
        prompts=4,
        words=words,
        learning_rate=1e-4,
        max_length=1024,
    )


# `padded` is what TRL does when nothing is chosen; `by_length` and `packed` are its other ways.
SFT = {"padded": 0, "packed": 0, "by_length": 0}
SHORT_SFT = SFT | {"by_length": 2}
BOTH_CACHES = {"dynamic": 0, "static": 2}
CASES = _named(
    Case("sft-tiny", "sft", "tiny", 32, SFT, {"padded": 4.0, "best": 2.2}, rows=256),
    Case("sft-small", "sft", "small", 6, SHORT_SFT, {"padded": 2.5, "best": 1.8}, rows=128),
    Case("sft-vocab", "sft", "wide", 6, {"padded": 0, "by_length": 2}, {"padded": 10.0}, rows=128),
    _grpo("tiny", 7, 4.5, variants=BOTH_CACHES),
    _grpo("tiny", 5, 7.0, suffix="long", words=205),
    _grpo("small", 4, 3.0),
)

# SmolLM2-135M-Instruct, a model that people use: `make bench ONLY=smollm2`. A step of it takes so
# long that three are measured in each run.
REAL_CASES = _named(
    Case(
        "sft-smollm2",
        "sft",
        "smollm2",
        5,
        {"padded": 0, "packed": 0, "by_length": 1},
        {"padded": 4.0, "best": 2.7},
        rows=64,
        memory=0.3,
        matmul=0.75,
    ),
    replace(_grpo("smollm2", 3, 4.5), memory=0.3),
)


def _decode(name: str, shape: str, prompts: int, length: int, new_tokens: int) -> Case:
    """Sampling alone: eight completions of each prompt."""
    return Case(
        name,
        "decode",
        shape,
        1,
        {},
        {},
        rows=1,
        prompts=prompts,
        words=length,
        new_tokens=new_tokens,
    )


def _on_gpu(shape: str) -> tuple[Case, Case, Case]:
    """About 16 k tokens a step in packs of 2,048; GRPO samples 64 completions at a time, sampling
    alone 512 of 1,024 tokens."""
    sft = Case(
        f"sft-{shape}",
        "sft",
        shape,
        8,
        SFT,
        {"best": 2.0},
        rows=192,
        prompts=24,
        words=180,
        max_length=2048,
        learning_rate=1e-4,
    )
    grpo = Case(
        f"grpo-{shape}",
        "grpo",
        shape,
        4,
        BOTH_CACHES,
        {"dynamic": 2.5},
        rows=32,
        words=205,
        new_tokens=256,
        max_length=2048,
        learning_rate=1e-5,
    )
    return sft, grpo, _decode(f"decode-{shape}", shape, prompts=64, length=512, new_tokens=1024)


# A step as runs have it: 64 tasks, 8 completions of 1,024 tokens each, prompts of about 512.
_FULL_STEP = Case(
    "grpo-4b-64x8",
    "grpo",
    "4b",
    4,
    {"dynamic": 0},
    {"dynamic": 2.5},
    rows=256,
    prompts=64,
    words=400,
    new_tokens=1024,
    max_length=4096,
    learning_rate=1e-5,
)
GPU_CASES = _named(
    *(case for shape in ("0.6b", "1.7b", "4b", "8b") for case in _on_gpu(shape)), _FULL_STEP
)
# What `gpu.py --device cpu` measures, to try the benchmark itself.
SELF_TEST = _named(
    Case("sft-try", "sft", "tiny", 4, {"padded": 0}, {}, rows=16, prompts=4),
    Case(
        "grpo-try", "grpo", "tiny", 4, {"dynamic": 0}, {}, rows=8, prompts=2, group=4, new_tokens=8
    ),
    _decode("decode-try", "tiny", prompts=2, length=16, new_tokens=8),
)


def jobs(
    only: str = "",
    threads: tuple[int, ...] = (1, 2),
    among: Mapping[str, Case] = CASES,
    by_name: Mapping[str, Case] = REAL_CASES,
) -> list[Job]:
    """The jobs a name selects: "" all, "sft", "sft-tiny", "sft-tiny@2"; several with commas.

    `by_name` holds cases that only their name or that of their shape selects.

    Raises ValueError for a name that selects nothing.
    """
    every = [Job(case, count) for count in threads for case in among.values()]
    if not only:
        return every
    named = [Job(case, count) for count in threads for case in by_name.values()]
    jobs: list[Job] = []
    for word in only.split(","):
        hits = [job for job in every if selects(word.strip(), job)]
        hits += [job for job in named if word.strip() in (job.name, job.case.name, job.case.shape)]
        if not hits:
            known = ", ".join([*among, *by_name])
            raise ValueError(f"{word!r} names no case; there are {known}, each also with @THREADS")
        jobs += [job for job in hits if job not in jobs]
    return jobs


def selects(word: str, job: Job) -> bool:
    return word in (job.name, job.case.name, job.case.algorithm, job.case.shape)


def settings(case: Case) -> dict[str, Any]:
    """The settings of our run. Held-out exams come before the first and after the last step,
    neither of which is measured; so does the only checkpoint."""
    common = {
        "learning_rate": case.learning_rate,
        "warmup_ratio": 0.0,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "steps": case.steps,
        "max_length": case.max_length,
        "seed": case.seed,
        "eval_every": case.steps,
        "save_every": case.steps,
        "eval_rows": 2,
    }
    if case.algorithm == "sft":
        return common | {"lr_schedule": "linear", "batch_size": case.prompts}
    return common | {
        "lr_schedule": "constant",
        "prompts_per_step": case.prompts,
        "group_size": case.group,
        "max_tokens": case.new_tokens,
        "loss": "dapo",
        "accept_reward_risk": True,
    }


def fingerprint(job: Job, versions: Mapping[str, str]) -> str:
    """Results are pooled only while this stays the same: the case, its shape, the software."""
    facts = asdict(job.case) | {"shape": asdict(SHAPES[job.case.shape]), "threads": job.threads}
    for asked in ("targets", "memory", "matmul"):  # what is asked for changes nothing measured
        del facts[asked]
    text = json.dumps([facts, dict(versions)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
