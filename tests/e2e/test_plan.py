"""A plan through a real MCP client and real trainers: nobody waits for its steps."""

from pathlib import Path
from typing import Any

import pytest
from loop_client import agent
from loops import ENVIRONMENT

from engine.home.run_dir import Home

pytestmark = [pytest.mark.worker, pytest.mark.e2e, pytest.mark.timeout(60)]

SFT: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "eval_rows": 12,
    "skill_rows": 4,
    "learning_rate": 3e-3,
}
GRPO: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_tokens": 20,
    "eval_rows": 12,
    "skill_rows": 4,
    "learning_rate": 1e-3,
}


async def test_a_chain_of_sft_grpo_and_an_evaluation_answers_with_a_verdict_for_each_step(
    home: Home, tmp_path: Path
) -> None:
    folder = tmp_path / "project" / "sums"
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text(ENVIRONMENT)
    async with agent(home, folder.parent) as a:
        env = (await a.call("push_env", path=str(folder)))["env_id"]
        then = [
            {"algorithm": "grpo", "settings": GRPO},
            {"algorithm": "evaluate", "rows": 12},
        ]
        plan = await a.call("submit_train", env_id=env, algorithm="sft", settings=SFT, then=then)
        assert plan["run_id"] == "sums-plan-1"
        done = await a.wait(plan["run_id"])
        sft, grpo, evaluation = done["steps"]
        assert done["state"] == "done" and done["next"][0]["tool"] == "compare_runs"
        verdicts = ("better", "worse", "no_difference", "inconclusive")
        assert all(step["verdict"] in verdicts for step in (sft, grpo, evaluation))
        assert list(evaluation["levels"]) == ["pebble", "sums-sft-1@best", "sums-grpo-1@best"]
        assert {tuple(level) for level in evaluation["levels"].values()} == {
            ("value", "interval", "tasks")
        }
        assert sft["before"] is not None
        compared = await a.call(**{"tool": "compare_runs", **done["next"][0]["arguments"]})
        assert compared["summary"] == evaluation["result"]
        # The adapter of the second run is that of the first, trained further.
        assert home.run("sums-grpo-1").read_config().settings.lora_rank == (
            home.run("sums-sft-1").read_config().settings.lora_rank
        )
