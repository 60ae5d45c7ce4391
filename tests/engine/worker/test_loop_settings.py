"""Settings and measurements of the loops that take more than one run to see."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from loops import curve, go, go_until, make_run, metrics, push, rollouts

from engine.home.run_dir import Home, RunDir

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

# Evaluations as small as they come: none of this is about them.
SHORT: dict[str, Any] = {"steps": 1, "eval_every": 4, "eval_rows": 2, "save_every": 4, "seed": 3}
SFT: dict[str, Any] = SHORT | {"batch_size": 8, "learning_rate": 3e-3}
GRPO: dict[str, Any] = SHORT | {
    "prompts_per_step": 6,
    "group_size": 4,
    "max_tokens": 20,
    "learning_rate": 3e-3,
    "updates_per_batch": 2,
}


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


def test_the_thinking_penalty_is_compared_by_and_shown(home: Home, env_id: str) -> None:
    settings = GRPO | {"thinking": True, "thinking_length_penalty": 0.5}
    run = make_run(home, env_id, "grpo", settings)
    go(run)
    rows = rollouts(run, 1)
    thought = [row["metrics"]["thinking_tokens"] for row in rows]
    assert len(set(thought)) > 1
    for row, tokens in zip(rows, thought, strict=True):
        assert row["metrics"]["thinking_penalty"] == pytest.approx(0.5 * tokens / 20)
        shaped = row.get("shaped_reward", row["reward"])
        assert shaped == pytest.approx(row["reward"] - 0.5 * tokens / 20)
    line = metrics(run)[1]
    lost = sum(0.5 * tokens / 20 for tokens in thought) / len(rows)
    assert line["reward_mean"] - line["shaped_reward_mean"] == pytest.approx(lost)
    assert line["thinking_tokens"] == pytest.approx(sum(thought) / len(rows))


def test_replaced_groups_are_counted_and_kept_apart_from_the_batch(home: Home, env_id: str) -> None:
    plain = make_run(home, env_id, "grpo", GRPO, run_id="plain-1")
    again = make_run(home, env_id, "grpo", GRPO | {"resample_uniform": 2})
    go(plain)
    go(again)
    before, after = metrics(plain)[1], metrics(again)[1]
    rows = rollouts(again, 1)
    dropped = [row for row in rows if row.get("dropped")]
    assert after["resampled_groups"] == len(dropped) / 4 > 0 == before["resampled_groups"]
    assert after["groups_effective"] > before["groups_effective"]
    assert len(rows) - len(dropped) == 24 and {row["group"] for row in rows} == set(
        range(6 + int(after["resampled_groups"]))
    )
    assert all(row["advantage"] == 0 for row in dropped)
    batch = [row["advantage"] == 0 for row in rows if not row.get("dropped")]
    assert after["zero_advantage_share"] == pytest.approx(sum(batch) / 24)
    assert after["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))


def test_async_sampling_is_one_update_behind_and_says_so(home: Home, env_id: str) -> None:
    one = GRPO | {"steps": 3, "updates_per_batch": 1}
    behind = make_run(home, env_id, "grpo", one | {"async_sampling": True}, run_id="behind-1")
    still = make_run(home, env_id, "grpo", one | {"learning_rate": 1e-7}, run_id="still-1")
    for run in (behind, still):
        go(run)
    stamped = [{row["policy_step"] for row in rollouts(behind, step)} for step in (1, 2, 3)]
    assert stamped == [{0}, {0}, {1}]
    assert [{r["policy_step"] for r in rollouts(still, s)} for s in (1, 2, 3)] == [{0}, {1}, {2}]
    # Step 2 was sampled by the policy before any update, which `still` as good as never left.
    said = [[row["completion"] for row in rollouts(run, 2)] for run in (behind, still)]
    assert said[0] == said[1]
    gaps = [line["sampler_gap_mean"] for line in metrics(behind)[1:]]
    assert gaps[0] < 1e-5 < gaps[1]


def test_a_resumed_run_samples_its_first_batch_by_the_policy_it_continues(
    home: Home, env_id: str
) -> None:
    settings = GRPO | {"steps": 3, "async_sampling": True}
    run = make_run(home, env_id, "grpo", settings)
    go_until(run, 1)
    go(run)
    stamped = [{row["policy_step"] for row in rollouts(run, step)} for step in (1, 2, 3)]
    assert stamped == [{0}, {1}, {1}]
    assert metrics(run)[2]["sampler_gap_mean"] < 1e-5 < metrics(run)[3]["sampler_gap_mean"]


def test_a_profiled_run_leaves_a_trace_of_two_steps_and_a_table(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "sft", SFT | {"steps": 3})
    config = json.loads(run.config.read_text())
    run.config.write_text(json.dumps(config | {"profile": True}))
    go(run)
    traces = sorted(path.name for path in run.logs.glob("trace_*"))
    assert traces == ["trace_step_2.json.gz", "trace_step_3.json.gz"]
    found = json.loads(gzip.decompress((run.logs / traces[0]).read_bytes()))
    named = {event.get("name") for event in found["traceEvents"]}
    assert {"aten::mm", "aten::addmm", "aten::_fused_adamw_"} & named
    table = (run.logs / "profile.txt").read_text()
    assert "step 2" in table and "step 3" in table and "Self CPU" in table


def test_what_a_run_measured_stands_in_its_metrics_manifest_and_result(
    home: Home, env_id: str
) -> None:
    run = make_run(home, env_id, "sft", SFT | {"steps": 2})
    result = go(run)
    lines = metrics(run)[1:]
    assert all(0 < line["mfu"] <= 1 and line["peak_memory"] > 1e8 for line in lines)
    manifest = json.loads(run.manifest.read_text())
    assert manifest["isolation"].partition(":")[0] in ("full", "no-namespaces", "limits")
    rate = manifest["matrix_flops"]
    assert result["measured"]["matrix_flops"] >= rate > 0
    spent = sum(line["train_s"] for line in lines)
    assert result["measured"]["seconds"]["train_s"] == pytest.approx(spent, abs=1e-3)
    # The peak at the end, which the last line may not have seen.
    largest = max(line["peak_memory"] for line in lines)
    assert largest <= result["measured"]["peak_memory"] < 1.1 * largest


def test_rows_without_packing_go_one_by_one_with_the_same_gradient(home: Home, env_id: str) -> None:
    one = SFT
    packed = make_run(home, env_id, "sft", one, run_id="packed-1")
    single = make_run(home, env_id, "sft", one | {"packing": False}, run_id="single-1")
    for run in (packed, single):
        go(run)
    together, apart = metrics(packed)[1], metrics(single)[1]
    assert (together["microbatches"], apart["microbatches"]) == (1, 8)
    assert apart["loss"] == pytest.approx(together["loss"], rel=3e-6)
    assert apart["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-5)


def tasks_played(run: RunDir, step: int) -> list[str]:
    """The tasks of the groups that a step trained on, in order."""
    return list(dict.fromkeys(row["task"] for row in rollouts(run, step)))


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_resumed_curriculum_plays_the_tasks_of_an_uninterrupted_one(
    home: Home, env_id: str, ahead: bool
) -> None:
    changes = {"curriculum": "rollouts", "async_sampling": ahead, "prompts_per_step": 8}
    settings = GRPO | changes | {"steps": 4}
    whole = make_run(home, env_id, "grpo", settings, run_id="whole-1")
    go(whole)
    broken = make_run(home, env_id, "grpo", settings, run_id="broken-1")
    go_until(broken, 3)
    go(broken)
    assert tasks_played(broken, 4) == tasks_played(whole, 4)
    if not ahead:  # sampled ahead, a resumed run's first batch is from a newer policy
        assert curve(broken) == curve(whole)
    seen = set(tasks_played(whole, 1))
    # The second step has tasks of the first again, which an epoch of the shuffle never has.
    assert 0 < len(seen & set(tasks_played(whole, 2))) <= 4
