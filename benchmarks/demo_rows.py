"""Prints, as JSON, the rows a finished run trained on, in the order it took them.

    .venv/bin/python -m benchmarks.demo_rows RUN_FOLDER

The order is asked of the worker's own loops, so that the peer can be given the same.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import RunDir
from engine.records.run_config import GRPOConfig, SFTConfig, read_run_config
from engine.worker.components import sample_rows
from engine.worker.rollouts.renderer import Renderer
from engine.worker.rollouts.task_order import shuffled_tasks
from engine.worker.sft import rows_of_step


def rows(run: RunDir) -> list[dict[str, Any]]:
    """A row per conversation and step: {"ids", "loss_mask"} for SFT, {"text", "task"} for GRPO."""
    config = read_run_config(run.config)
    if not isinstance(config, SFTConfig | GRPOConfig):
        raise ValueError(f"{run.id} trained nothing")
    settings = config.settings
    tokenizer = AutoTokenizer.from_pretrained(config.base.path)
    render = Renderer(tokenizer, [tokenizer.eos_token_id])
    tasks = read_tasks(find_env(run.home, config.env_id), "train")
    supervised = isinstance(config, SFTConfig)
    if supervised:
        tasks = [task for task in tasks if task["gold"]]
    tasks = sample_rows(tasks, settings.max_examples, settings.seed)
    if isinstance(config, SFTConfig):
        chosen, together = rows_of_step, config.settings.batch_size
    else:
        chosen, together = shuffled_tasks, config.settings.prompts_per_step
    taken = [
        tasks[index]
        for step in range(1, settings.steps + 1)
        for index in chosen(step, len(tasks), together, settings.seed)
    ]
    if not isinstance(config, SFTConfig):
        return [
            {"text": render.text(task["prompt"], (), prompt=True), "task": task["id"]}
            for task in taken
        ]
    loss_on = config.settings.loss_on
    rendered = [render.rows(task["gold"], (), loss_on)[0] for task in taken]
    return [{"ids": each.ids, "loss_mask": each.loss_mask} for each in rendered]


if __name__ == "__main__":
    print(json.dumps(rows(RunDir(Path(sys.argv[1])))))
