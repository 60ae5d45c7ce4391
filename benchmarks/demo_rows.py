"""Prints, as JSON, the rows a finished run trained on, in the order it took them.

    .venv/bin/python -m benchmarks.demo_rows RUN_FOLDER

The order is asked of the worker's own loops, so that the peer can be given the same.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.core.files import read_json
from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import RunDir
from engine.worker.playing import tasks_of_step
from engine.worker.rollouts.renderer import Renderer
from engine.worker.sft import rows_of_step, sample_rows


def rows(run: RunDir) -> list[dict[str, Any]]:
    """A row per conversation and step: {"ids", "loss_mask"} for SFT, {"text", "task"} for GRPO."""
    config = read_json(run.config)
    settings = config["settings"]
    tokenizer = AutoTokenizer.from_pretrained(config["base"]["path"])
    render = Renderer(tokenizer, [tokenizer.eos_token_id])
    tasks = read_tasks(find_env(run.home, config["env_id"]), "train")
    supervised = config["algorithm"] == "sft"
    if supervised:
        tasks = [task for task in tasks if task["gold"]]
    tasks = sample_rows(tasks, settings)
    chosen = rows_of_step if supervised else tasks_of_step
    taken = [
        tasks[index]
        for step in range(1, settings["steps"] + 1)
        for index in chosen(step, len(tasks), settings)
    ]
    if not supervised:
        return [
            {"text": render.text(task["prompt"], (), prompt=True), "task": task["id"]}
            for task in taken
        ]
    rendered = [render.conversation(task["gold"], (), settings["loss_on"]) for task in taken]
    return [{"ids": each.ids, "loss_mask": each.loss_mask} for each in rendered]


if __name__ == "__main__":
    print(json.dumps(rows(RunDir(Path(sys.argv[1])))))
