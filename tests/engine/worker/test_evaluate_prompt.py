"""A search for a prompt with a model that is loaded here."""

import json
from pathlib import Path

import pytest
from fake_endpoint import fake_endpoint
from prompted import BAD, GOOD, push_sums, writes

from engine.core.metrics import names
from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home
from engine.records.lines.prompt_line import PromptLine, chosen_prompt
from engine.records.lines.trajectory_record import read_trajectories
from engine.runs.prompts.submit import config_of, resolve
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.run_folder import RunFiles
from engine.worker.core.job import Job, Stopped
from engine.worker.evaluate import search_prompt

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]


def test_the_prompt_that_pebble_understands_is_found_and_judged(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_KEY", "sk-a-key-that-nobody-may-ever-see-0123456789")
    env = push_sums(home, tmp_path / "a", size=8)
    with fake_endpoint(writes("Repeat the question.", GOOD)) as writer:
        settings = {
            "reflection": writer.config(home, "big"),
            "max_tokens": 12,
            "select_rows": 12,
            "max_rollouts": 70,
            "max_calls": 4,
        }
        request = TrainRequest(env_id=env, algorithm="prompt", settings=settings)
        config = config_of(request, resolve(home, request), "")
        RunFiles(config).writer(home)("sums-prompt-1")
        run = home.run("sums-prompt-1")
        stopped = Job(run.path)
        stopped.stop_signal.set()
        with pytest.raises(Stopped):
            search_prompt(stopped)
        assert not writer.bodies and not read_trajectories(run.rollouts(1))
        result = search_prompt(Job(run.path))
    assert result["verdict"] == "better", result["summary"]
    evidence = result["evidence"]
    assert evidence["before"]["value"] < 0.5 < evidence["after"]["value"]
    assert len(writer.bodies) <= 4 and result["prompt"]["rollouts"] <= 70
    lines = PromptLine.read_all(run.prompts)
    assert lines[0].texts == {"system": BAD} and lines[0].round == 0
    chosen = chosen_prompt(run.prompts)
    assert chosen is not None and chosen.texts == {"system": GOOD}
    assert chosen.env_id == result["prompt"]["env_id"] == find_env(home, str(chosen.env_id)).env_id
    # The answers of a round: its tasks with the prompt before and with the new one.
    answers = read_trajectories(run.rollouts(1))
    assert [answer.member for answer in answers] == [0] * 4 + [1] * 4
    assert answers[0].prompt and answers[0].prompt[0]["content"] == BAD
    assert answers[-1].prompt and answers[-1].prompt[0]["content"] == "Repeat the question."
    assert {answer.task for answer in answers[:4]} == {answer.task for answer in answers[4:]}
    metrics = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(len(metrics)))
    assert set(names("prompt")) <= set().union(*metrics)
    heldout = [t for t in read_tasks(find_env(home, env)) if t["split"] == "heldout"]
    assert evidence["before"]["tasks"] == len(heldout)
