"""Whole small runs of both loops, in this process, on pebble."""

import json
from pathlib import Path
from typing import Any

import pytest
from loops import (
    BASE,
    ENVIRONMENT,
    GRPO,
    PEBBLE,
    ROWS_ENVIRONMENT,
    SFT,
    curve,
    go,
    go_until,
    make_run,
    metrics,
    push,
    save_random_model,
    trace,
    weights,
)

from engine.core.files import read_json
from engine.core.metrics import METRICS, names
from engine.environments import env_facts, registry
from engine.environments.push import push_env
from engine.home.halves import choosing
from engine.home.run_dir import Home
from engine.records.lines.evaluation_row import read_evaluation
from engine.worker import training
from engine.worker.core.failures import WorkerFailure
from engine.worker.rollouts.guard import NO_SIGNAL_STEPS
from engine.worker.update import losses

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "distill"])
def test_a_run_leaves_everything_the_contract_names(
    home: Home, env_id: str, algorithm: str
) -> None:
    run = make_run(home, env_id, algorithm, BASE[algorithm])
    result = go(run)
    lines = metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for name in (name for name in names(algorithm) if METRICS[name].where != "gpu"):
        where = lines if METRICS[name].where == "evaluation" else lines[1:]
        assert any(name in line for line in where), name
    known = set(METRICS) | {"step", "time", "short"}
    extra = {k for line in lines for k in line} - known
    assert extra == {"heldout_short"}
    assert "heldout_success" in lines[0] and "heldout_success" in lines[-1]
    assert result["best_step"] in (2, 4)
    assert run.resolve_checkpoint("best") == run.checkpoint(result["best_step"])
    assert run.manifest.exists()
    assert (run.checkpoint(4) / "MANIFEST.json").exists()
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    saved = [e["step"] for e in events if e["event"] == "checkpoint"]
    assert saved == sorted(set(saved)) and saved[-1] == 4
    assert result["verdict"] in ("better", "worse", "no_difference", "inconclusive", "unknown")


def test_sft_learns_its_rows(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "sft", SFT | {"steps": 20, "eval_every": 20, "keep": 0.0})
    go(run)
    lines = metrics(run)
    assert lines[-1]["loss"] < 0.5 * lines[1]["loss"]
    assert lines[-1]["heldout_loss"] < 0.5 * lines[0]["heldout_loss"]


def test_grpo_raises_the_reward_within_thirty_steps(home: Home, env_id: str) -> None:
    changes = {"steps": 30, "eval_every": 30, "group_size": 8, "learning_rate": 1e-3}
    run = make_run(home, env_id, "grpo", GRPO | changes)
    go(run)
    rewards = [line["reward_mean"] for line in metrics(run)[1:]]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:3]) / 3 + 0.2


@pytest.mark.parametrize(
    "algorithm",
    ["sft", "grpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("dpo", "distill"))],
)
def test_a_resumed_run_has_the_curve_and_the_weights_of_an_uninterrupted_one(
    home: Home, env_id: str, algorithm: str
) -> None:
    settings = BASE[algorithm] | {"lora_dropout": 0.1}
    whole = make_run(home, env_id, algorithm, settings, run_id="whole-1")
    go(whole)
    broken = make_run(home, env_id, algorithm, settings, run_id="broken-1")
    go_until(broken, 3)
    assert [line["step"] for line in metrics(broken)] == [0, 1, 2, 3]
    go(broken)
    assert curve(broken) == curve(whole)
    assert weights(broken) == weights(whole)


def test_a_trainer_that_died_between_checkpoints_repeats_its_steps_exactly(
    home: Home, env_id: str
) -> None:
    settings = GRPO | {"eval_every": 4}
    whole = make_run(home, env_id, "grpo", settings, run_id="whole-1")
    go(whole)
    broken = make_run(home, env_id, "grpo", settings, run_id="broken-1")
    go_until(broken, 3, killed=True)
    latest = broken.latest_checkpoint()
    assert latest is not None and latest.name == "step_000002"
    go(broken)
    assert curve(broken) == curve(whole)
    assert weights(broken) == weights(whole)


def test_a_resumed_run_points_to_its_best_again_though_the_link_was_never_made(
    home: Home, env_id: str
) -> None:
    settings = SFT | {"steps": 4, "eval_every": 2, "save_every": 1, "keep_checkpoints": 9}
    run = make_run(home, env_id, "sft", settings)
    go(run)
    best = run.resolve_checkpoint("best")
    assert best is not None
    run.best.unlink()  # as a kill between the checkpoint and the link leaves it
    assert go(run)["best_step"] == int(best.name.removeprefix("step_"))
    assert run.resolve_checkpoint("best") == best


def test_the_same_seed_gives_the_same_run(home: Home, env_id: str) -> None:
    runs = [make_run(home, env_id, "grpo", GRPO, run_id=f"again-{i}") for i in (1, 2)]
    for run in runs:
        go(run)
    assert trace(runs[0]) == trace(runs[1])


def test_continuing_a_run_starts_from_its_adapter(home: Home, env_id: str) -> None:
    first = make_run(home, env_id, "sft", SFT | {"steps": 12, "eval_every": 12})
    go(first)
    second = make_run(
        home,
        env_id,
        "grpo",
        GRPO | {"steps": 1, "kl_coef": 0.1, "updates_per_batch": 1},
        model="sums-run-1",
        run_id="sums-run-2",
    )
    go(second)
    assert metrics(second)[0]["heldout_success"] == metrics(first)[-1]["heldout_success"]
    # The reference is the adapter it started from, so at step 1 nothing diverges yet.
    assert metrics(second)[1]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_tokens_trained_are_the_tokens_sampled(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "grpo", GRPO | {"steps": 1})
    go(run)
    line = metrics(run)[1]
    assert line["sampler_gap_max"] < 1e-4
    rows = [json.loads(r) for r in run.rollouts(1).read_text().splitlines()]
    assert len(rows) == 24
    for row in rows:
        if "ids" in row:
            assert row["loss_mask"] == [1] * len(row["ids"])
            assert row["tokens"] == len(row["ids"]) == len(row["logprobs"])
            assert max(row["logprobs"]) <= 0.0


def test_a_random_model_of_another_size_trains_by_path_the_same_way(
    home: Home, env_id: str, tmp_path: Path
) -> None:
    folder = save_random_model(tmp_path / "other")
    for algorithm in ("sft", "grpo"):
        run = make_run(
            home,
            env_id,
            algorithm,
            BASE[algorithm] | {"steps": 2},
            model=str(folder),
            run_id=f"other-{algorithm}-1",
        )
        assert go(run)["steps"] == 2


@pytest.mark.parametrize(("keep", "kept"), [(1, ["4"]), (3, ["2", "3", "4"])])
def test_old_checkpoints_are_tidied_away(
    home: Home, env_id: str, keep: int, kept: list[str]
) -> None:
    settings = SFT | {"save_every": 1, "eval_every": 4, "keep_checkpoints": keep}
    run = make_run(home, env_id, "sft", settings)
    go(run)
    steps = sorted(p.name.removeprefix("step_00000") for p in run.checkpoints.glob("step_*"))
    assert steps == kept


def test_epochs_decide_the_number_of_steps(home: Home, env_id: str) -> None:
    settings = {k: v for k, v in SFT.items() if k != "steps"} | {"epochs": 1, "max_examples": 20}
    run = make_run(home, env_id, "sft", settings)
    assert go(run)["steps"] == 3  # 8 + 8 + 4 rows: the last batch is smaller, not dropped
    assert metrics(run)[-1]["tokens"] < metrics(run)[1]["tokens"]


def test_the_importance_cap_reaches_the_loss(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    real = losses.truncated_importance

    def spy(old: Any, sampled: Any, cap: float) -> Any:
        seen.append(cap)
        return real(old, sampled, cap)

    monkeypatch.setattr(losses, "truncated_importance", spy)
    run = make_run(home, env_id, "grpo", GRPO | {"steps": 1, "tis_cap": 1.5})
    go(run)
    assert set(seen) == {1.5}


def test_a_run_without_progress_stops_early_when_asked(home: Home, env_id: str) -> None:
    settings = SFT | {
        "steps": 40,
        "eval_every": 1,
        "learning_rate": 1e-7,
        "eval_rows": 2,
        "stop_early": "heldout",
    }
    run = make_run(home, env_id, "sft", settings)
    ended_after = go(run)["steps"]
    assert ended_after < 40
    # An attempt after a kill that came before the result was written trains no step more.
    assert go(run)["steps"] == ended_after


def rows_of_each_side() -> list[dict[str, Any]]:
    """One-digit sums: 20 to learn, 6 dev and 9 held-out ones."""
    sides = ["train"] * 20 + ["dev"] * 6 + ["heldout"] * 9
    pairs = [(a, b) for a in range(1, 6) for b in range(1, 8)]
    return [
        {"id": f"{a}+{b}", "prompt": f"What is {a} + {b}?", "answer": f"{a + b}", "split": side}
        for (a, b), side in zip(pairs, sides, strict=True)
    ]


def test_with_dev_tasks_the_held_out_ones_choose_nothing_and_are_all_reported(
    home: Home, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.json").write_text(json.dumps(rows_of_each_side()))
    env_id = push(home, folder, source=ROWS_ENVIRONMENT, name="rows")
    run = make_run(home, env_id, "sft", SFT)
    best = go(run)["best_step"]
    other = 6 - best  # 2 and 4 are evaluated

    def asked(step: int) -> dict[str, set[str]]:
        rows = read_evaluation(run.evals(step))
        halves = ("select", "report")
        return {half: {row.task for row in rows if row.half == half} for half in halves}

    dev = {row["id"] for row in rows_of_each_side() if row["split"] == "dev"}
    held_out = {row["id"] for row in rows_of_each_side() if row["split"] == "heldout"}
    assert asked(0) == asked(best) == {"select": dev, "report": held_out}
    assert asked(other) == {"select": dev, "report": set()}
    half = choosing(run)
    assert half is not None and (half.tasks, half.side) == (6, "dev")
    assert "all 9 held-out tasks" in half.about


GAME = """
from envs import Message, MultiTurnEnv, Score, Task

class Endless(MultiTurnEnv):
    def tasks(self):
        return [Task(str(i), f"Guess my number from {i} to {i + 9}.", split=s)
                for i, s in enumerate(["train"] * 20 + ["heldout"] * 10)]
    def start(self, task):
        return [0, 0]
    def step(self, state, completion):
        state[0] += 1
        state[1] += len(completion.content)
        return [Message("user", "higher")]
    def score(self, task, state):
        return Score(float(state[1] % 5), metrics={"turns": state[0]})

def load_environment():
    return Endless()
"""


def test_max_turns_ends_a_game(home: Home, tmp_path: Path) -> None:
    env = push(home, tmp_path / "endless", GAME, "endless")
    settings = GRPO | {"steps": 1, "max_turns": 3, "accept_reward_risk": True, "max_length": 256}
    run = make_run(home, env, "grpo", settings)
    go(run)
    rows = [json.loads(r) for r in run.rollouts(1).read_text().splitlines()]
    played = [r for r in rows if r["stop_reason"] == "max_turns"]
    assert played and all(r["turns"] == 3 and r["metrics"]["turns"] == 3 for r in played)
    assert all(r["turns"] <= 3 for r in rows)
    for row in rows:
        if "ids" in row:  # what the environment said is read, never trained
            assert 0 < sum(row["loss_mask"]) <= len(row["ids"])
            assert (sum(row["loss_mask"]) < len(row["ids"])) is (row["turns"] > 1)


@pytest.mark.parametrize("kind", ["long", "tool"])
def test_the_exams_of_sft_leave_room_for_what_its_rows_teach(
    home: Home, tmp_path: Path, kind: str
) -> None:
    """As much as GRPO and evaluate leave: a call of a tool, an answer longer than its prompt."""
    if kind == "tool":
        example = PEBBLE.parents[1] / "envs" / "examples" / "tool_call"
        env = push_env(home, str(example), name="calls", roots=[example]).env_id
    else:
        told = ENVIRONMENT.replace('answer=f"{a + b}"', 'answer=f"{a + b} " * 30')
        env = push(home, tmp_path / "long", told, "long")
    usual = make_run(home, env, "grpo", GRPO | {"max_tokens": None}, run_id="usual-1")
    run = make_run(home, env, "sft", SFT | {"steps": 1, "eval_rows": 4})
    go(run)
    asked = read_json(run.manifest)["eval_sampling"]
    wanted = read_json(usual.config)["settings"]
    assert asked["max_tokens"] == wanted["max_tokens"] >= 40
    facts = env_facts.env_facts(home, registry.find_env(home, env), PEBBLE)
    assert facts.longest_turn <= asked["max_tokens"]


def test_tasks_that_do_not_fit_are_left_out(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "grpo", GRPO)
    config = json.loads(run.config.read_text())
    config["settings"]["max_length"] = 24
    run.config.write_text(json.dumps(config))
    with pytest.raises(WorkerFailure) as caught:
        go(run)
    assert caught.value.kind == "data" and "max_length" in str(caught.value.advice)


def test_a_run_says_how_many_tasks_it_leaves_out(home: Home, tmp_path: Path) -> None:
    prompt = 'f"What is {a} + {b}?"'
    uneven = ENVIRONMENT.replace(prompt, prompt + ' + " please" * (40 if a > 6 else 0)')
    assert uneven != ENVIRONMENT
    env = push(home, tmp_path / "uneven", uneven, "uneven")
    run = make_run(home, env, "grpo", GRPO | {"steps": 1, "max_length": 128})
    go(run)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    (event,) = [each for each in events if each["event"] == "tasks_left_out"]
    assert 0 < event["left_out"] < event["tasks"]
    assert str(event["left_out"]) in event["message"] and "max_length" in event["message"]
    assert metrics(run)[1]["tasks_left_out"] == event["left_out"]


RAISING = """
from envs import Score, SingleTurnEnv, Task

class Raising(SingleTurnEnv):
    def tasks(self):
        return [Task(str(i), f"Say {i}.", answer=str(i),
                     split="train" if i < 60 else "heldout") for i in range(100)]
    def score(self, task, completion):
        if int(task.id) % 2 == 0:
            raise ValueError("an even task")
        return Score(float(len(completion) % 3), success=completion == task.answer)

def load_environment():
    return Raising()
"""


def test_too_many_failed_rewards_end_the_run(home: Home, tmp_path: Path) -> None:
    env = push(home, tmp_path / "raising", RAISING, "raising")
    settings = GRPO | {"accept_reward_risk": True, "eval_rows": 4, "steps": 3, "group_size": 8}
    run = make_run(home, env, "grpo", settings | {"max_reward_errors": 0.2})
    with pytest.raises(WorkerFailure) as caught:
        go(run)
    assert caught.value.kind == "reward" and "even task" in caught.value.evidence
    run = make_run(home, env, "grpo", settings | {"max_reward_errors": 0.9}, run_id="patient-1")
    go(run)
    assert 0.2 < metrics(run)[1]["reward_errors"] < 1


FLAT = """
from envs import Score, SingleTurnEnv, Task

class Flat(SingleTurnEnv):
    def tasks(self):
        return [Task(str(i), f"Say {i}.", answer="never",
                     split="train" if i < 60 else "heldout") for i in range(80)]
    def score(self, task, completion):
        return Score(0.0, success=False)

def load_environment():
    return Flat()
"""


FEW_ANSWERS = GRPO | {
    "prompts_per_step": 2,
    "group_size": 2,
    "max_tokens": 3,
    "eval_rows": 2,
    "accept_reward_risk": True,
}


def test_a_reward_that_never_differs_ends_the_run_with_no_signal(
    home: Home, tmp_path: Path
) -> None:
    env = push(home, tmp_path / "flat", FLAT, "flat")
    settings = FEW_ANSWERS | {"steps": 30, "eval_every": 30}
    run = make_run(home, env, "grpo", settings)
    with pytest.raises(WorkerFailure) as caught:
        go(run)
    assert caught.value.kind == "no_signal"
    assert metrics(run)[-1]["step"] == NO_SIGNAL_STEPS - 1


def test_rewards_that_differ_no_more_end_the_run_in_good_order_with_an_exam(
    home: Home, tmp_path: Path
) -> None:
    learnt = FLAT.replace(
        "        return Score(0.0, success=False)",
        "        self.scored = getattr(self, 'scored', 0) + 1\n"
        "        return Score(float(self.scored >= 24 or self.scored % 2), success=False)",
    )
    env = push(home, tmp_path / "learnt", learnt, "learnt")
    settings = FEW_ANSWERS | {"steps": 60, "eval_every": 60}
    run = make_run(home, env, "grpo", settings)
    go(run)
    lines = metrics(run)
    assert NO_SIGNAL_STEPS < lines[-1]["step"] < 40, "it ends long before its last step"
    assert "heldout_reward" in lines[-1], "the last step has its exam"
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    (event,) = [each for each in events if each["event"] == "stopped_early"]
    assert event["step"] == lines[-1]["step"] and "differ" in event["message"]
    assert run.checkpoint(lines[-1]["step"]).is_dir()


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = losses.cross_entropy
    calls: list[int] = []

    def poisoned(policy: Any, tokens: int) -> Any:
        calls.append(1)
        return real(policy, tokens) * (float("nan") if len(calls) > 2 else 1.0)

    monkeypatch.setattr("engine.worker.update.supervised.cross_entropy", poisoned)
    run = make_run(home, env_id, "sft", SFT)
    with pytest.raises(WorkerFailure) as caught:
        go(run)
    assert caught.value.kind == "nonfinite"
    latest = run.latest_checkpoint()
    assert latest is not None and latest.name == "step_000002"


def test_weights_that_do_not_change_are_reported(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_step(self: Any, step: int, pending: Any) -> tuple[Any, float, float]:
        return pending.read(), 1.0, 1.0

    monkeypatch.setattr(training.Training, "optimizer_step", no_step)
    run = make_run(home, env_id, "sft", SFT)
    with pytest.raises(WorkerFailure) as caught:
        go(run)
    assert caught.value.kind == "no_update"


def test_an_exam_sat_twice_leaves_each_task_once(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "sft", SFT)
    go(run)
    best = int(run.best.resolve().name.removeprefix("step_"))
    before = sorted(run.evals(best).read_text().splitlines())
    go(run)  # as after a kill during the last exam: no step is left, the report half is played
    assert sorted(run.evals(best).read_text().splitlines()) == before
