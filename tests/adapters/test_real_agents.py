"""A published agent, unmodified, as the command of an environment: push, dry run, GRPO, evaluate.

Opt-in (`make adapters`): the agent is installed from the index that pip is set up for. What a
gateway does with what programs ask is tested in tests/engine/worker/gateway.
"""

import json
import shutil
from pathlib import Path

import pytest
from adapter_walk import walked
from loop_client import agent
from loops import PEBBLE

from engine.curation.training_traces import write_traces
from engine.home.run_dir import Home
from engine.records.lines.trajectory_record import read_trajectories
from engine.worker.network.policy import load_base, pick_device

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(900)]
EXAMPLE = Path(__file__).parents[2] / "envs" / "examples" / "llm_agent"


async def test_the_agent_llm_looks_prices_up_and_is_trained_on_what_it_sampled(
    home: Home, tmp_path: Path
):
    folder = tmp_path / "project" / "llm_agent"
    shutil.copytree(EXAMPLE, folder)
    async with agent(home, folder.parent) as a:
        seen = await walked(a, folder, max_turns=4, max_length=512, max_tokens=64)
    assert seen["push"]["kind"] == "command"
    run = home.run(seen["run"])
    rollouts = [
        record for step in run.rollout_steps() for record in read_trajectories(run.rollouts(step))
    ]
    assert rollouts and [record.error for record in rollouts if record.error] == []
    # Pebble calls the tool in most rollouts, and `llm` goes on with what the tool returned.
    assert sum(record.turns > 1 for record in rollouts) > len(rollouts) / 2
    # Each answer goes on with the ids of those before it: nothing is rendered twice.
    assert [len(record.conversations) for record in rollouts if record.conversations] == [
        1 for record in rollouts if record.conversations
    ]
    write_traces(home, run.id, tmp_path / "traces.jsonl")
    base = load_base(Path(PEBBLE), pick_device("cpu"), precision="float32")
    turns = [
        turn
        for line in (tmp_path / "traces.jsonl").read_text().splitlines()
        for turn in json.loads(line)["turns"]
        if turn["metadata"]["policy_step"] == 0  # the base itself: no update was made yet
    ]
    assert turns
    for turn in turns:
        prompt, sampled = turn["prompt_token_ids"], turn["completion_token_ids"]
        logprobs = base.network.logits(prompt + sampled, None).log_softmax(-1)
        under_trainer = [
            float(logprobs[len(prompt) + place - 1, token]) for place, token in enumerate(sampled)
        ]
        assert turn["per_token_logps"] == pytest.approx(under_trainer, abs=1e-3)
