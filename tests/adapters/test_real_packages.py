"""Environments of others run unmodified, with their real packages: push, dry run, GRPO, evaluate.

Opt-in (`make adapters`): the packages are installed from the index that pip is set up for. What
holds without them is tested in tests/envs/adapters.
"""

import json
from pathlib import Path

import pytest
from adapter_walk import walked
from loop_client import agent

from engine.home.run_dir import Home

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(480)]

REASONING_GYM = """
[adapter]
kind = "reasoning-gym"
family = "chain_sum"
size = 60
suffix = "Reply with the number alone."

[adapter.settings]
min_terms = 2
max_terms = 2
min_digits = 1
max_digits = 1
"""


SKYRL_GYM = """
[adapter]
kind = "skyrl-gym"
"""

# What `flash env setup` writes, word for word but for its comments; the rows are ours.
FLASH = """
from __future__ import annotations

import json
from pathlib import Path

from freesolo.datasets.types import TaskExample
from freesolo.environments import EnvironmentSingleTurn, RewardResult


DEFAULT_DATASET_PATH = Path(__file__).parent / "dataset" / "train.jsonl"


def load_jsonl(path: str | Path):
    rows = []
    with Path(path).open() as f:
        for line in f:
            line = line.strip()
            if line:
                rows.append(json.loads(line))
    return rows


def exact_match_reward(example: TaskExample, response_text: str) -> RewardResult:
    expected = str(example.output if example.output is not None else "").strip()
    score = 1.0 if expected and expected in response_text else 0.0
    return RewardResult(score=score, threshold=1.0)


class StarterEnv(EnvironmentSingleTurn):
    dataset = load_jsonl(DEFAULT_DATASET_PATH)

    def build_prompt_messages(self, example: TaskExample, prompt_text: str):
        return [{"role": "user", "content": example.input}]

    def score_response(self, example: TaskExample, response_text: str) -> RewardResult:
        return exact_match_reward(example, response_text)


def load_environment(dataset_path: str | None = None, **kwargs) -> StarterEnv:
    env = StarterEnv()
    if dataset_path:
        env.dataset = load_jsonl(dataset_path)
    return env
"""

FLASH_GUESS = """
from freesolo.datasets.types import TaskExample
from freesolo.environments import (
    EnvironmentEpisode,
    EnvironmentMultiTurn,
    EnvironmentStepResult,
    RewardMetric,
    RewardResult,
)


class Guess(EnvironmentMultiTurn):
    dataset = [{"input": f"A number below {n + 2}.", "output": str(n)} for n in range(40)]

    def start_episode(self, example: TaskExample, prompt_text: str):
        return [{"role": "user", "content": example.input}]

    def max_episode_turns(self, example: TaskExample) -> int:
        return 3

    def step_episode(self, example, messages, assistant_response):
        if assistant_response.strip() == example.output:
            return EnvironmentStepResult(done=True, final_response_text=example.output)
        return EnvironmentStepResult(done=False, messages=({"role": "user", "content": "No."},))

    def score_episode(self, example, episode: EnvironmentEpisode) -> RewardResult:
        turns = sum(turn.role == "assistant" for turn in episode.turns)
        right = episode.response_text == example.output
        return RewardResult(
            score=float(right),
            threshold=1.0,
            metrics=(RewardMetric(name="turns", score=turns),),
        )


def load_environment() -> Guess:
    return Guess()
"""

GYMNASIUM = """
[adapter]
kind = "gymnasium"
env = "Blackjack-v1"
size = 120
instructions = "Your sum, the dealer's card, a usable ace. Say stick or hit."
actions = ["stick", "hit"]
"""

VERIFIERS = """
[adapter]
kind = "verifiers"
taskset = "sums"
answer = "answer"

[adapter.config]
rows = 40
"""

# The shapes of the tasksets that come with verifiers: typed data, a state, rewards that read the
# trace and run a program.
VERIFIERS_SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumState(vf.State):
    ready: bool = False


class SumTask(vf.Task[SumData, SumState]):
    async def setup(self, trace: vf.Trace) -> None:
        trace.state.ready = True

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("reply.txt", trace.last_reply.encode())

    @vf.reward(weight=0.75)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def counted(self, runtime: vf.Runtime) -> float:
        ran = await runtime.run(["cat", "reply.txt"], {})
        return float(ran.stdout == self.data.answer)

    @vf.metric
    async def shape(self, trace: vf.Trace) -> dict[str, float]:
        return {"ready": trace.state.ready, "read": len(trace.messages)}


class SumConfig(vf.TasksetConfig):
    rows: int = 10


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.rows):
            yield SumTask(
                SumData(
                    prompt=f"Add {a} and 7.",
                    system_prompt="Reply with the number alone.",
                    answer=str(a + 7),
                ),
                self.config.task,
            )


__all__ = ["SumTaskset"]
"""

VERIFIERS_GUESS = """
import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        won = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                won = segment.last_reply == str(task.data.secret)
                if won:
                    break
                segment = await interaction.turn("No.")
        interaction.trace.record_reward("won", float(won))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            data = GuessData(prompt=f"A number below {number + 2}.", secret=number)
            yield GuessTask(data, self.config.task)
            number += 1


__all__ = ["GuessTaskset", "GuessEnv"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project" / "foreign"
    made.mkdir(parents=True)
    return made


def written(folder: Path, toml: str, files: dict[str, str] | None = None) -> Path:
    for name, text in {"environment.toml": toml, **(files or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def test_a_family_of_reasoning_gym(home: Home, folder: Path):
    async with agent(home, folder.parent) as a:
        seen = await walked(a, written(folder, REASONING_GYM))
    assert seen["push"]["kind"] == "single" and seen["push"]["audit"]["verdict"] == "ok"


async def test_skyrl_gym_scores_rows_of_its_own_form(home: Home, folder: Path):
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"Add {a} and 7."}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": str(a + 7)},
        }
        for a in range(10, 60)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    # One of its packages has no wheel.
    (home.root / "config.toml").write_text("allow_source_builds = true\n")
    async with agent(home, folder.parent) as a:
        seen = await walked(a, written(folder, SKYRL_GYM, {"train.jsonl": lines}))
    assert seen["push"]["kind"] == "multi"


async def test_the_example_environment_of_flash(home: Home, folder: Path):
    rows = "".join(
        json.dumps({"input": f"Add {a} and 7.", "output": str(a + 7)}) + "\n" for a in range(10, 60)
    )
    files = {"environment.py": FLASH, "dataset/train.jsonl": rows}
    async with agent(home, folder.parent) as a:
        # Its scorer pays any text that holds the answer: a risk, to which one has to agree.
        toml = '[adapter]\nkind = "flash"\n'
        seen = await walked(a, written(folder, toml, files), accept_reward_risk=True)
    assert seen["push"]["kind"] == "single" and seen["push"]["audit"]["verdict"] == "risk"


async def test_an_environment_of_flash_of_several_turns(home: Home, folder: Path):
    files = {"environment.py": FLASH_GUESS}
    async with agent(home, folder.parent) as a:
        seen = await walked(
            a, written(folder, '[adapter]\nkind = "flash"\n', files), max_turns=3, max_length=256
        )
    assert seen["push"]["kind"] == "multi"


async def test_a_gymnasium_environment_played_in_words(home: Home, folder: Path):
    async with agent(home, folder.parent) as a:
        seen = await walked(a, written(folder, GYMNASIUM), max_turns=3, max_length=512)
    assert seen["push"]["kind"] == "multi"


async def test_a_taskset_of_verifiers(home: Home, folder: Path):
    async with agent(home, folder.parent) as a:
        seen = await walked(a, written(folder, VERIFIERS, {"sums.py": VERIFIERS_SUMS}))
    assert seen["push"]["kind"] == "single" and seen["push"]["audit"]["verdict"] == "ok"


async def test_a_taskset_of_verifiers_whose_env_leads_the_conversation(home: Home, folder: Path):
    toml = '[adapter]\nkind = "verifiers"\ntaskset = "guess"\nsize = 40\n'
    async with agent(home, folder.parent) as a:
        seen = await walked(
            a, written(folder, toml, {"guess.py": VERIFIERS_GUESS}), max_turns=3, max_length=256
        )
    assert seen["push"]["kind"] == "multi"
