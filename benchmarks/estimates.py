"""Are the estimates right? Predicts runs, then does them: time, band and peak memory.

    python -m benchmarks.estimates FOLDER [--runs 20] [--seed 1]
    python -m benchmarks.estimates FOLDER --real [--only sft,dpo]

In a home of its own: the machine is probed, a few runs are done so that there is something to
correct by, then every judged run is estimated before the first of them starts, so that none of
them corrects another. Runs differ in algorithm, environment, model (pebble and two random ones of
3 and 25 M parameters), batch, lengths, rank and evaluations. Actual time is the supervisor's, from
start to end; peak memory is the high-water mark of the trainer.

With --real the runs are those of `REAL`: SmolLM2-135M-Instruct, and random weights of the shape of
SmolLM2-360M. All are predicted before the first of them starts (`fresh`), and those that are not
the first of their model and algorithm once more when their turn comes (`taught`).
"""

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from engine.cost import estimate
from engine.environments import push, registry
from engine.home.run_dir import Home
from engine.models import catalog, library
from engine.records.settings import GivenSettings
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "envs" / "examples"
SHAPES = {"random-3m": (256, 4, 4, 2), "random-25m": (512, 8, 8, 4)}  # hidden, layers, heads, kv
CALIBRATION = 3  # runs of each algorithm before the judged ones
LEVELS = ("low", "likely", "high")
SHORT_GRPO: GivenSettings = {"prompts_per_step": 4, "group_size": 8, "eval_rows": 16}
LARGE = "random-360m"  # the shape of SmolLM2-360M under SmolLM2's tokenizer
# Model, algorithm, tasks, settings. The first of each model and algorithm teaches the others.
REAL: tuple[tuple[str, str, str, GivenSettings], ...] = (
    ("smollm2", "sft", "booking_fields", {"batch_size": 8, "steps": 6, "eval_rows": 40}),
    ("smollm2", "grpo", "review_sentiment", SHORT_GRPO | {"steps": 4, "eval_rows": 40}),
    ("smollm2", "dpo", "pairs", {"batch_size": 8, "steps": 4, "eval_rows": 16}),
    ("smollm2", "sft", "booking_fields", {"batch_size": 16, "lora_rank": 64, "steps": 4}),
    ("smollm2", "sft", "review_sentiment", {"batch_size": 4, "steps": 12, "eval_rows": 80}),
    ("smollm2", "grpo", "booking_fields", SHORT_GRPO | {"steps": 2, "max_tokens": 96}),
    ("smollm2", "grpo", "review_sentiment", SHORT_GRPO | {"group_size": 16, "steps": 3}),
    ("smollm2", "dpo", "pairs", {"batch_size": 16, "lora_rank": 64, "steps": 3}),
    (LARGE, "sft", "booking_fields", {"batch_size": 4, "steps": 2, "eval_rows": 8}),
    (LARGE, "dpo", "pairs", {"batch_size": 4, "steps": 2, "eval_rows": 8}),
)


def make_model(folder: Path, shape: tuple[int, int, int, int]) -> Path:
    """Random weights under pebble's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv = shape
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "engine" / "pebble")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def draw(chance: random.Random, algorithm: str, models: list[str]) -> dict[str, Any]:
    """Arguments of one run."""
    model = chance.choice(models)
    large = "25m" in model
    common = {
        "eval_rows": chance.choice([8, 40, 100]),
        "lora_rank": chance.choice([4, 16, 48]),
        "seed": chance.randrange(1000),
    }
    if algorithm == "sft":
        steps = chance.randint(4, 12) if large else chance.randint(15, 60)
        return {
            "algorithm": "sft",
            "env": chance.choice(["arithmetic", "sft_only", "tool_call"]),
            "model": model,
            "settings": common | {"steps": steps, "batch_size": chance.choice([4, 8, 16])},
        }
    steps = chance.randint(2, 4) if large else chance.randint(6, 20)
    if model != "pebble":
        steps = min(steps, 9)  # random weights earn nothing, and ten such steps end a run
    return {
        "algorithm": "grpo",
        "env": chance.choice(["arithmetic", "tool_call", "guess_number"]),
        "model": model,
        "settings": common
        | {
            "steps": steps,
            "prompts_per_step": chance.choice([4, 8, 16]),
            "group_size": chance.choice([4, 8]),
            "max_tokens": chance.choice([12, 24, 40]),
        },
    }


def predicted(home: Home, run: dict[str, Any]) -> dict[str, Any]:
    figures = estimate.estimate_cost(
        home, run["env_id"], run["model"], run["algorithm"], run["settings"]
    )
    return {
        "seconds": {level: figures["hours"][level] * 3600 for level in LEVELS},
        "memory": figures["peak_memory"]["total"],
        "phases": figures["seconds"],
        "basis": figures["basis"],
    }


def done(home: Home, run: dict[str, Any]) -> dict[str, Any]:
    """Do the run, within "max_gpu_hours" if given; returns state, seconds and peak memory."""
    answer = lifecycle.submit(
        home,
        TrainRequest(
            env_id=run["env_id"],
            model=run["model"],
            algorithm=run["algorithm"],
            settings=run["settings"],
            max_gpu_hours=run.get("max_gpu_hours"),
        ),
    )
    run_id = answer["run_id"]
    while True:
        status = lifecycle.wait(home, run_id, timeout_s=45)
        if status["state"] not in ("queued", "preparing", "running", "stopping"):
            break
    folder = home.run(run_id)
    measured = json.loads(folder.result.read_text())["measured"] if folder.result.exists() else {}
    return {
        "run_id": run_id,
        "state": status["state"],
        "error": (status.get("error") or {}).get("message"),
        "seconds": 3600 * status["spent_hours"],
        "memory": measured.get("peak_memory", 0),
        "phases": measured.get("seconds", {}),
    }


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the estimates held, over finished runs."""
    inside = likely = memory = narrow = 0
    for row in rows:
        predicted, was = row["predicted"], row["actual"]
        low, middle, high = (predicted["seconds"][level] for level in LEVELS)
        inside += low <= was["seconds"] <= high
        narrow += high / low <= 3
        likely += abs(middle / was["seconds"] - 1) <= 0.35
        memory += abs(predicted["memory"] / was["memory"] - 1) <= 0.15
    return {
        "runs": len(rows),
        "inside": inside,
        "band_at_most_3": narrow,
        "likely_within_35": likely,
        "memory_within_15": memory,
    }


def make_large(folder: Path, tokenizer_folder: Path) -> None:
    """Random weights of the shape of SmolLM2-360M, with the tokenizer of another model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def push_pairs(home: Home, folder: Path, bookings: str) -> str:
    """Pairs for DPO, from the booking tasks: the reference answer, and that of another message."""
    tasks = [row for row in registry.read_tasks(registry.find_env(home, bookings)) if row["gold"]]
    (folder / "datasets").mkdir(parents=True, exist_ok=True)
    with (folder / "datasets" / "train.jsonl").open("w", encoding="utf-8") as file:
        for task, other in itertools.pairwise(tasks):
            rows = {"chosen": [task["gold"][-1]], "rejected": [other["gold"][-1]]}
            file.write(json.dumps({"prompt": task["prompt"], **rows}) + "\n")
    return push.push_env(home, str(folder), roots=[folder.parent]).env_id


def real_runs(folder: Path, only: set[str]) -> list[dict[str, Any]]:
    """Predict and do the runs of `REAL` whose algorithm is in `only`, or all where it is empty.
    Returns them with their predictions and what they took."""
    home = Home.locate(folder / "home-real")
    library.add(home, "smollm2")
    large = folder / LARGE
    if not large.exists():
        make_large(large, catalog.resolve_model(home, "smollm2").base_path)
    envs = {
        name: push.push_env(home, str(EXAMPLES / name), roots=[EXAMPLES]).env_id
        for name in ("booking_fields", "review_sentiment")
    }
    envs["pairs"] = push_pairs(home, folder / "pairs", envs["booking_fields"])
    runs: list[dict[str, Any]] = [
        {
            "model": str(large) if model == LARGE else model,
            "algorithm": algorithm,
            "env": env,
            "env_id": envs[env],
            "settings": settings,
        }
        for model, algorithm, env, settings in REAL
        if not only or algorithm in only
    ]
    for run in runs:
        run["fresh"] = run["predicted"] = predicted(home, run)
    first: set[tuple[str, str]] = set()
    for run in runs:
        kind = (run["model"], run["algorithm"])
        if kind in first:
            run["taught"] = run["predicted"] = predicted(home, run)
        first.add(kind)
        run["actual"] = done(home, run)
        if "taught" in run:
            show(run | {"predicted": run["fresh"]})
        show(run)
        with (folder / "estimates.jsonl").open("a") as out:
            out.write(json.dumps(run | {"time": time.time()}) + "\n")
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="SmolLM2 and its larger shape")
    parser.add_argument("--only", default="", help="algorithms, with commas, for --real")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.real:
        rows = real_runs(asked.folder.resolve(), set(filter(None, asked.only.split(","))))
        print(json.dumps(judge([row for row in rows if row["actual"]["state"] == "done"])))
        return 0
    home = Home.locate(asked.folder / "home")
    models = ["pebble", "pebble"]
    for name, shape in SHAPES.items():
        path = asked.folder / name
        if not path.exists():
            make_model(path, shape)
        models.append(str(path))
    envs = {
        name: push.push_env(home, str(EXAMPLES / name), roots=[EXAMPLES]).env_id
        for name in ("arithmetic", "sft_only", "tool_call", "guess_number")
    }
    chance = random.Random(asked.seed)
    first = [draw(chance, a, models) for a in ("sft", "grpo") for _ in range(CALIBRATION)]
    # Some end without a result, for want of a signal; others stand by.
    judged = [draw(chance, ("sft", "grpo")[i % 2], models) for i in range(2 * asked.runs)]
    for run in first + judged:
        run["env_id"] = envs[run["env"]]
    for run in first:
        print("calibration", json.dumps(done(home, run)), flush=True)
    for run in judged:
        run["predicted"] = predicted(home, run)
    rows: list[dict[str, Any]] = []
    for run in judged:
        if len(rows) == asked.runs:
            break
        run["actual"] = done(home, run)
        ok = run["actual"]["state"] == "done"
        rows += [run] if ok else []
        show(run)
        with (asked.folder / "estimates.jsonl").open("a") as out:
            out.write(json.dumps(run | {"time": time.time()}) + "\n")
    print(json.dumps(judge(rows)))
    return 0


def show(run: dict[str, Any]) -> None:
    guess, was = run["predicted"], run["actual"]
    band = " / ".join(f"{guess['seconds'][level]:.0f}" for level in LEVELS)
    print(
        f"{run['algorithm']:4} {run['env']:12} {Path(run['model']).name:11} "
        f"said {band} s, took {was['seconds']:.1f} s; "
        f"said {guess['memory'] / 1e6:.0f} MB, held {was['memory'] / 1e6:.0f} MB; {was['state']}"
        + (f" ({was['error']})" if was["error"] else ""),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
