"""Rollouts become training traces in OpenEnv's form: a turn for each answer, token by token."""

import json
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.curation.training_traces import write_traces
from engine.home.run_dir import Home

PLAIN = {"step": 1, "task": "t0", "group": 0, "member": 0, "advantage": 0.5, "turns": 2}
ANSWER = {"prompt": [], "completion": "", "reward": 1.0, "success": True, "stop_reason": "stop"}
TOKENS = {
    "prompt_ids": [1, 2],
    "ids": [10, 11, 3, 4, 12],  # an answer of two tokens, a reply of two, an answer of one
    "loss_mask": [1, 1, 0, 0, 1],
    "logprobs": [-0.1, -0.2, 0.0, 0.0, -0.3],
}
BRANCH = {"prompt_ids": [7], "ids": [8], "loss_mask": [1], "logprobs": [-0.4]}


def written(home: Home, *records: dict) -> str:
    run = home.run("sums-grpo-1")
    run.rollouts(1).parent.mkdir(parents=True)
    run.rollouts(1).write_text("".join(json.dumps(record) + "\n" for record in records))
    return run.id


def test_a_turn_has_what_was_read_what_was_sampled_and_a_mask_over_both(home: Home, tmp_path: Path):
    run_id = written(
        home,
        PLAIN | ANSWER | TOKENS | {"branch_ids": [BRANCH]},
        PLAIN | ANSWER | {"member": 1},  # its tokens were not kept
        PLAIN | ANSWER | {**TOKENS, "logprobs": None, "member": 2},  # of an earlier version
    )
    reply = write_traces(home, run_id, tmp_path / "traces.jsonl")
    assert (reply.traces, reply.turns) == (1, 3)
    (trace,) = map(json.loads, (tmp_path / "traces.jsonl").read_text().splitlines())
    assert trace["schema_version"] == 1 and set(trace) == {"schema_version", "turns"}
    first, second, other = trace["turns"]
    told = {"task": "t0", "reward": 1.0, "advantage": 0.5, "policy_step": 0}
    assert first == {
        "node_id": "sums-grpo-1-1-0-0-0-0",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [10, 11],
        "per_token_logps": [-0.1, -0.2],
        "loss_mask": [0, 0, 1, 1],
        "metadata": told,
    }
    assert second["prompt_token_ids"] == [1, 2, 10, 11, 3, 4]
    assert second["completion_token_ids"] == [12] and second["per_token_logps"] == [-0.3]
    assert second["loss_mask"] == [0, 0, 0, 0, 0, 0, 1]
    # A sub-agent's conversation has the same reward and a name of its own.
    assert (other["prompt_token_ids"], other["metadata"]) == ([7], told)
    assert len({turn["node_id"] for turn in trace["turns"]}) == 3


def test_a_run_without_tokens_is_refused(home: Home, tmp_path: Path):
    run_id = written(home, PLAIN | ANSWER)
    with pytest.raises(UserError, match="kept no tokens of rollouts"):
        write_traces(home, run_id, tmp_path / "traces.jsonl")
    assert not (tmp_path / "traces.jsonl").exists()
