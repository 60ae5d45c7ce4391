"""Are the estimates right? Predicts runs, then does them: time, band and peak memory.

    python -m benchmarks.estimates FOLDER [--runs 20] [--seed 1]

In a home of its own: the machine is probed, a few runs are done so that there is something to
correct by, then every judged run is estimated before the first of them starts, so that none of
them corrects another. Runs differ in algorithm, environment, model (pebble and two random ones of
3 and 25 M parameters), batch, lengths, rank and evaluations. Actual time is the supervisor's, from
start to end; peak memory is the high-water mark of the trainer.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from engine.cost import estimate
from engine.environments import push
from engine.home.run_dir import Home
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "envs" / "examples"
SHAPES = {"random-3m": (256, 4, 4, 2), "random-25m": (512, 8, 8, 4)}  # hidden, layers, heads, kv
CALIBRATION = 3  # runs of each algorithm before the judged ones
LEVELS = ("low", "likely", "high")


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
    """Do the run; returns state, seconds and peak memory."""
    answer = lifecycle.submit(
        home,
        TrainRequest(
            env_id=run["env_id"],
            model=run["model"],
            algorithm=run["algorithm"],
            settings=run["settings"],
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
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
