"""Real runs of the built-in model, healthy and spoilt: what `diagnose` says first (make evidence).

Each run goes through submit, supervisor and trainer, as an agent's would, and takes 5 to 50 s of
two idle cores. Settings were tried out on other seeds than those judged here.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from as_json import kept_skills
from typer.testing import CliRunner

from engine.core.files import read_lines
from engine.environments import push
from engine.evidence.detect.diagnose import diagnose
from engine.home.run_dir import Home
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest
from engine.skills import pebble as skills
from engine.skills.batteries import SKILLS
from mcp_server.cli.main import app

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(600)]

SOURCE = """
import json, re
from pathlib import Path
from envs import Score, SingleTurnEnv, Task

STYLE = re.compile(r"(?:The answer is |Answer: )?(.*?)\\.?")

class Skill(SingleTurnEnv):
    def tasks(self):
        file = Path(__file__).parent / "datasets" / "rows.jsonl"
        return [Task(**json.loads(line)) for line in file.read_text().splitlines()]

    def score(self, task, completion):
        said = STYLE.fullmatch(completion.strip())
        right = said is not None and said.group(1) == task.metadata["gold"]
        return {score}

def load_environment():
    return Skill()
"""
STRICT = "Score(float(right), success=right)"
# Pays for length, whatever an answer says.
LONG_WINDED = "Score(min(1.0, len(completion) / 40), success=right)"
# Pays for digits in their place.
PART = """Score(
            float(right) or 0.1 * sum(a == b for a, b in zip(completion, task.metadata["gold"])),
            success=right)"""
# Pays for length, and a little for a right answer.
MOSTLY_LONG = "Score(0.2 * right + 0.8 * min(1.0, len(completion) / 40), success=right)"


def environment(
    folder: Path,
    skill: Any,
    *,
    score: str = STRICT,
    train: int = 1200,
    heldout: int = 400,
    noise: float = 0.0,
    answer: str = "{}",
    replay: float = 0.0,
) -> Path:
    """An environment over one of pebble's skills; `noise` of the reference answers are wrong, and
    for each training row there are `replay` more of what pebble knows already."""
    rng = random.Random(7)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < train + heldout:
        sample = skill(rng)
        prompt = sample.messages[0]["content"]
        rows.setdefault(prompt, {"gold": sample.answer})
    golds = [row["gold"] for row in rows.values()]
    for _ in range(int(replay * train)):
        sample = skills.draw(rng, rng.choice(SKILLS), (), measured=True)
        rows.setdefault(sample.messages[0]["content"], {"gold": sample.answer})
    (folder / "datasets").mkdir(parents=True)
    with (folder / "datasets" / "rows.jsonl").open("w") as file:
        for number, (prompt, row) in enumerate(rows.items()):
            side = "heldout" if number < heldout else "train"
            said = rng.choice(golds) if side == "train" and rng.random() < noise else row["gold"]
            line = {
                "id": f"t{number}",
                "prompt": prompt,
                "answer": answer.format(said),
                "split": side,
                "metadata": {"gold": row["gold"]},
            }
            file.write(json.dumps(line) + "\n")
    (folder / "environment.py").write_text(SOURCE.replace("{score}", score))
    return folder


def hard_subtraction(rng: random.Random) -> skills.Sample:
    a, b = rng.randint(1000, 9999), rng.randint(10, 99)
    answer = str(a - 7 * b)
    return skills.one_turn("hard", f"Take {b} times 7 from {a}.", reply=answer, answer=answer)


def train(home: Home, folder: Path, algorithm: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run it to its end; returns the diagnosis, with alerts and seconds beside it."""
    began = time.monotonic()
    env_id = push.push_env(home, str(folder), roots=[folder.parent]).env_id
    given = lifecycle.submit(
        home, TrainRequest(env_id=env_id, algorithm=algorithm, settings=settings)
    )
    run_id = given["run_id"]
    status: dict[str, Any] = {"state": "queued"}
    print(f"\n{folder.name} {algorithm}:", end=" ", flush=True)
    while status["state"] not in ("done", "failed", "cancelled"):
        status = lifecycle.wait(home, run_id, "end", 50.0)
    found: dict[str, Any] = diagnose(home, run_id)
    found["verdict"] = status.get("verdict")
    events, _ = read_lines(home.run(run_id).events, 0)
    found["alerts"] = [(e["step"], e["id"]) for e in events if e.get("event") == "alert"]
    ids = [finding["id"] for finding in found["findings"]]
    print(
        f"{status['state']} {status.get('verdict', '')}, "
        f"findings {ids}, alerts {found['alerts']}, {time.monotonic() - began:.0f} s\n"
        f"  {found['summary']}"
    )
    return found


GRPO: dict[str, Any] = {
    "steps": 20,
    "prompts_per_step": 8,
    "group_size": 8,
    "eval_every": 10,
    "eval_rows": 240,
    "learning_rate": 1e-3,
    "max_tokens": 24,
}
# Skill, algorithm, reward, settings. All of them learn something that 120 to 400 reported tasks can
# show: a run whose gain stays in the noise is rightly told that it is underpowered.
HEALTHY: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "sums": (skills.add_two, "grpo", STRICT, GRPO),
    "sums-slow": (
        skills.add_two,
        "grpo",
        STRICT,
        GRPO | {"learning_rate": 5e-4, "steps": 30, "seed": 1},
    ),
    "sums-kl": (
        skills.add_two,
        "grpo",
        STRICT,
        GRPO | {"kl_coef": 0.01, "temperature": 0.8, "seed": 2},
    ),
    "sums-large-groups": (
        skills.add_two,
        "grpo",
        STRICT,
        GRPO | {"group_size": 16, "loss": "dr_grpo", "seed": 3},
    ),
    "sums-part": (
        skills.add_two,
        "grpo",
        PART,
        GRPO | {"advantage": "rloo", "eval_rows": 400, "seed": 4},
    ),
    "sums-long": (
        skills.add_two,
        "grpo",
        STRICT,
        GRPO | {"steps": 45, "eval_every": 15, "seed": 5},
    ),
    # Two thirds are solved from the start: to be seen, the gain needs more tasks and more steps.
    "numbers": (
        skills.sort_numbers,
        "grpo",
        STRICT,
        GRPO
        | {
            "loss": "cispo",
            "updates_per_batch": 2,
            "prompts_per_step": 16,
            "steps": 40,
            "eval_every": 20,
            "eval_rows": 800,
            "seed": 8,
        },
    ),
    "sft-numbers": (skills.sort_numbers, "sft", STRICT, {"epochs": 2}),
    "sft-subtract": (
        skills.subtract,
        "sft",
        STRICT,
        {"steps": 60, "lr_schedule": "constant"},
    ),
    "sft-ends": (skills.ends, "sft", STRICT, {"epochs": 1, "batch_size": 16, "seed": 6}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_in_peace(home: Home, tmp_path: Path, name: str):
    skill, algorithm, score, settings = HEALTHY[name]
    folder = environment(tmp_path / name, skill, score=score, heldout=800)
    found = train(home, folder, algorithm, settings)
    # SFT on one skill alone costs the old ones: that is found where it is so, and nothing else.
    kept = kept_skills(home.run(found["run_id"]))
    forgot = kept["verdict"] == "forgotten"
    lost = [skill for skill in kept["batteries"] if skill["before"] - skill["after"] > 0.1]
    assert not forgot or lost, "what is called forgotten fell, and far"
    assert not forgot or algorithm == "sft"
    assert [f["id"] for f in found["findings"]] == (["forgetting"] if forgot else [])
    assert found["alerts"] == []


def first(found: dict[str, Any]) -> str:
    return found["findings"][0]["id"] if found["findings"] else "nothing"


def test_a_reward_that_pays_for_length_is_found_out(home: Home, tmp_path: Path):
    folder = environment(tmp_path / "length", skills.add_two, score=LONG_WINDED)
    found = train(
        home, folder, "grpo", GRPO | {"steps": 30, "max_tokens": 48, "accept_reward_risk": True}
    )
    assert first(found) == "reward_hacking"
    assert any(name == "reward_hacking" for _, name in found["alerts"])


def test_a_reward_that_pays_little_for_what_is_right_is_found_out(home: Home, tmp_path: Path):
    folder = environment(tmp_path / "little", skills.add_two, score=MOSTLY_LONG)
    found = train(
        home,
        folder,
        "grpo",
        GRPO | {"steps": 30, "max_tokens": 48, "accept_reward_risk": True, "seed": 7},
    )
    assert first(found) == "reward_hacking"


def test_a_temperature_near_zero_is_found_out(home: Home, tmp_path: Path):
    folder = environment(tmp_path / "cold", skills.add_two)
    found = train(home, folder, "grpo", GRPO | {"temperature": 0.01})
    assert first(found) == "uniform_groups"
    assert found["findings"][0]["lever"]["setting"] == "temperature"
    assert found["alerts"][0][1] == "uniform_groups"


def test_tasks_that_are_too_hard_are_found_out(home: Home, tmp_path: Path):
    folder = environment(tmp_path / "hard", hard_subtraction)
    found = train(home, folder, "grpo", GRPO)
    assert first(found) == "too_hard"


def test_overfitting_rows_are_found_out(home: Home, tmp_path: Path):
    folder = environment(tmp_path / "noise", skills.add_two, train=48, noise=0.5)
    found = train(
        home,
        folder,
        "sft",
        {"steps": 120, "batch_size": 8, "eval_every": 15, "learning_rate": 5e-3},
    )
    # Half of the rows are wrong, and they are few: both are causes.
    assert first(found) in ("overfitting", "rows_disagree")


def test_answers_cut_short_are_found_out(home: Home, tmp_path: Path):
    folder = environment(tmp_path / "cut", skills.add_two)
    found = train(home, folder, "grpo", GRPO | {"max_tokens": 3})
    assert first(found) == "truncation"


# --- what a run costs, and whether anybody touched it --------------------------------------------


@pytest.mark.parametrize(("replay", "word"), [(0.0, "forgotten"), (3.0, "kept")])
def test_a_new_skill_costs_the_old_ones_unless_they_are_replayed(
    home: Home, tmp_path: Path, replay: float, word: str
):
    folder = environment(tmp_path / "ends", skills.ends, train=160, heldout=80, replay=replay)
    found = train(
        home,
        folder,
        "sft",
        {"steps": 90, "learning_rate": 1.5e-3, "batch_size": 24, "eval_every": 30},
    )
    run = home.run(found["run_id"])
    kept = kept_skills(run)
    print(f"  replay {replay}: {kept['summary']}")
    assert found["verdict"] == "better", "the new skill is learned either way"
    assert kept["verdict"] == word, kept["summary"]
    summary = lifecycle.status(home, run.id)["summary"]
    assert ("Forgotten (pebble skills)" in summary) == (word == "forgotten"), summary


def test_a_run_that_was_edited_by_hand_fails_to_verify(home: Home, tmp_path: Path):
    folder = environment(tmp_path / "seal", skills.ends, train=160, heldout=80)
    run = home.run(train(home, folder, "sft", {"steps": 10, "eval_every": 5})["run_id"])
    weights = run.checkpoint(run.checkpoint_steps()[-1]) / "adapter_model.safetensors"

    def verified() -> tuple[int, str]:
        said = CliRunner().invoke(app, ["verify", run.id])
        return said.exit_code, said.output

    assert verified()[0] == 0
    for path in (run.metrics, weights, run.evals(run.eval_steps()[-1])):
        whole, mode = path.read_bytes(), path.stat().st_mode
        path.chmod(0o600)
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        code, output = verified()
        assert code == 1 and path.name in output, output
        path.write_bytes(whole)
        path.chmod(mode)
        assert verified()[0] == 0
