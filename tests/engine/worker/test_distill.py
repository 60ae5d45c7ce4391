"""Whole small runs of distillation, in this process, on pebble."""

from pathlib import Path
from typing import Any

import pytest
from chat_server import chat_server
from loops import (
    DISTILL,
    SFT,
    curve,
    go,
    go_until,
    make_run,
    metrics,
    push,
    save_random_model,
    save_teacher,
    weights,
)

from engine.home.run_dir import Home
from engine.records.lines.event import read_events
from engine.records.lines.trajectory_record import read_trajectories
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


def test_the_policy_comes_near_its_teacher_and_earns_more(home: Home, env_id: str) -> None:
    taught = make_run(
        home, env_id, "sft", SFT | {"steps": 30, "eval_every": 30}, run_id="sums-teacher-1"
    )
    go(taught)
    changes = {"teacher": "sums-teacher-1", "steps": 15, "eval_every": 15, "group_size": 4}
    run = make_run(home, env_id, "distill", DISTILL | changes | {"learning_rate": 1e-3})
    go(run)
    lines = metrics(run)
    start = sum(line["reverse_kl"] for line in lines[1:4]) / 3
    end = sum(line["reverse_kl"] for line in lines[-3:]) / 3
    assert start > 0.3 and end < 0.3 * start
    # What it samples is rewarded more, though no reward was trained on.
    assert lines[-1]["reward_mean"] > lines[1]["reward_mean"] + 0.1
    assert lines[-1]["teacher_logprob"] > lines[1]["teacher_logprob"]
    (message,) = (e.message for e in read_events(run.events) if e.event == "teacher")
    assert message == "sums-teacher-1, an adapter beside the policy's"
    first = read_trajectories(run.rollouts(1))
    share = sum(t.advantage * t.tokens for t in first) / sum(t.tokens for t in first)
    assert -share == pytest.approx(lines[1]["reverse_kl"], rel=1e-6)


def test_a_run_with_a_group_of_one_learns_too(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "distill", DISTILL | {"group_size": 1})
    go(run)
    assert all(line["grad_norm"] > 0 for line in metrics(run)[1:])


def test_a_trainer_that_died_between_checkpoints_repeats_its_steps_exactly(
    home: Home, env_id: str
) -> None:
    settings = DISTILL | {"eval_every": 4, "lora_dropout": 0.1}
    whole = make_run(home, env_id, "distill", settings, run_id="whole-1")
    go(whole)
    broken = make_run(home, env_id, "distill", settings, run_id="broken-1")
    go_until(broken, 3, killed=True)
    latest = broken.latest_checkpoint()
    assert latest is not None and latest.name == "step_000002"
    go(broken)
    assert curve(broken) == curve(whole)
    assert weights(broken) == weights(whole)


@pytest.mark.long  # test_teacher_endpoint shows what such a teacher says of tokens
def test_a_teacher_on_loopback_teaches_what_it_teaches_in_this_process(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = save_teacher(home)  # the policy goes on from there, so pebble has something to teach
    monkeypatch.setenv("TEACHER_API_KEY", "sesame")
    settings = DISTILL | {"steps": 2, "save_every": 2, "eval_rows": 2}
    here = make_run(
        home, env_id, "distill", settings | {"teacher": "pebble"}, model=start, run_id="a"
    )
    go(here)
    with chat_server(home) as (_, url):
        remote: dict[str, Any] = {
            "teacher": url,
            "teacher_model": "pebble",
            "teacher_key_env": "TEACHER_API_KEY",
        }
        there = make_run(home, env_id, "distill", settings | remote, model=start, run_id="b")
        go(there)
        monkeypatch.setenv("TEACHER_API_KEY", "wrong")
        with pytest.raises(WorkerFailure, match="refused to rate"):
            go(make_run(home, env_id, "distill", settings | remote, run_id="c"))
    for ours, theirs in zip(metrics(here)[1:], metrics(there)[1:], strict=True):
        for name in ("reverse_kl", "teacher_logprob", "grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-4), name
    assert "sesame" not in there.config.read_text() + there.events.read_text()


def test_a_teacher_of_another_shape_is_loaded_beside_the_policy(
    home: Home, env_id: str, tmp_path: Path
) -> None:
    folder = save_random_model(tmp_path / "other")
    run = make_run(
        home, env_id, "distill", DISTILL | {"steps": 2, "eval_rows": 2, "teacher": str(folder)}
    )
    go(run)
    (message,) = (e.message for e in read_events(run.events) if e.event == "teacher")
    assert message == f"{folder}, a model of its own"
    assert all(line["reverse_kl"] > 1 for line in metrics(run)[1:])  # it knows nothing of sums


def test_an_adapter_of_another_base_does_not_teach(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "distill", DISTILL)
    job: Job[Any] = Job(run.path)
    entry = job.config.teacher
    assert entry.kind == "local"
    folder = Path(entry.adapter)
    text = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(text.replace('"r": 4', '"r": 5'))
    with pytest.raises(WorkerFailure, match="adapter"):
        go(run)
