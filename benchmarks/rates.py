"""Are the settings that are chosen by themselves good ones? The same run with others in turn.

    python -m benchmarks.rates FOLDER --algorithm sft --model smollm2 [--factors 0.25,1,4]
    python -m benchmarks.rates FOLDER --model smollm2 --settings '{"lora_rank": 4}' ...

`--model` is `smollm2` or one of the random shapes of estimates.py (`random-3m`, `random-25m`). SFT
learns 128 bookings (random shapes: sums), GRPO reviews. Prints the held-out loss or success before
and after, and the largest gradient norm, for each share of the default rate, or for each
`--settings`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.estimates import EXAMPLES, SHAPES, done, make_model
from engine.core.files import read_json
from engine.environments import push
from engine.home.run_dir import Home
from engine.models import catalog, library
from engine.models.sizing.usual_steps import learning_rate
from engine.records.settings import GivenSettings
from mcp_server.api import verbs

# Algorithm, settings; SFT as the second demo trains, with fewer held-out answers.
SETTINGS: dict[str, GivenSettings] = {
    "sft": {"max_examples": 128, "batch_size": 8, "steps": 16, "eval_every": 16, "eval_rows": 32},
    "grpo": {
        "steps": 6,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_tokens": 12,
        "eval_every": 6,
        "eval_rows": 64,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2", choices=["smollm2", *SHAPES])
    parser.add_argument("--algorithm", default="sft", choices=sorted(SETTINGS))
    parser.add_argument("--factors", default="0.25,0.5,1,2,4", help="shares of the default rate")
    parser.add_argument("--settings", action="append", default=[], help="JSON, once per run")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    home = Home.locate(asked.folder / "home")
    if asked.model == "smollm2":
        library.add(home, asked.model)
        model, env = (
            asked.model,
            "booking_fields" if asked.algorithm == "sft" else "review_sentiment",
        )
    else:
        path = asked.folder.resolve() / asked.model
        if not path.exists():
            make_model(path, SHAPES[asked.model])
        model, env = str(path), "arithmetic"
    env_id = push.push_env(home, str(EXAMPLES / env), roots=[EXAMPLES]).env_id
    usual = learning_rate(asked.algorithm, catalog.resolve_model(home, model).facts.hidden)
    changes: list[GivenSettings] = [json.loads(text) for text in asked.settings] or [
        {"learning_rate": float(text) * usual} for text in asked.factors.split(",")
    ]
    for change in changes:
        settings = SETTINGS[asked.algorithm] | change
        run: dict[str, Any] = {"env_id": env_id, "model": model, "algorithm": asked.algorithm}
        outcome = done(home, run | {"settings": settings})
        line = {"model": asked.model, "algorithm": asked.algorithm} | change
        print(json.dumps(line | curves(home, outcome["run_id"])), flush=True)
    return 0


def curves(home: Home, run_id: str) -> dict[str, Any]:
    """First and last held-out loss and success of a run, and its largest gradient norm."""
    logs = verbs.read_logs(home, run_id, limit=200)
    columns = {name: [row[i] for row in logs["rows"]] for i, name in enumerate(logs["columns"])}
    steps = read_json(home.run(run_id).config)["settings"]["steps"]
    seen: dict[str, Any] = {"run": run_id, "steps": steps}
    for name in ("heldout_loss", "heldout_success"):
        values = [value for value in columns.get(name, []) if value is not None]
        seen[name] = [values[0], values[-1]] if values else None
    norms = [value for value in columns.get("grad_norm", []) if value is not None]
    return seen | {"grad_norm": max(norms, default=None)}


if __name__ == "__main__":
    sys.exit(main())
