"""Tasksets of verifiers score answers, lead conversations, and are refused by what they need."""

from typing import Any

import pytest
from verifiers_stand_in import PACKAGE

from envs.config.problem import EnvProblem
from envs.host.process import EpisodeFailed

TOML = '[adapter]\nkind = "verifiers"\n'
SUMS = """
    import verifiers.v1 as vf

    class SumData(vf.TaskData):
        answer: str

    class SumTask(vf.Task):
        data_class = SumData

        @vf.reward(weight=0.5)
        async def exact(self, trace):
            return float(trace.last_reply == self.data.answer)

        @vf.reward(weight=0.5)
        async def asked(self, trace):
            first, second, reply = trace.messages
            return float((first.role, second.role, reply.role) == ("system", "user", "assistant"))

    class SumConfig(vf.TasksetConfig):
        rows: int = 2

    class SumTaskset(vf.Taskset):
        task_class, config_class = SumTask, SumConfig

        def load(self):
            for a in range(self.config.rows):
                yield SumTask(SumData(prompt=f"{a} + 7", system_prompt="Add.", answer=str(a + 7)))

    __all__ = ["SumTaskset"]
    """
GUESS = """
    import verifiers.v1 as vf

    class GuessData(vf.TaskData):
        secret: str

    class GuessTask(vf.Task):
        data_class = GuessData

    class GuessConfig(vf.EnvConfig):
        player: object = vf.AgentConfig(max_turns=3)

    class Guess(vf.Env):
        config_class = GuessConfig

        async def run(self, task, agents):
            won = False
            async with agents.player.interaction(task) as talk:
                segment = await talk.turn("Begin.")
                while not segment.terminated and not won:
                    won = int(segment.last_reply) == int(task.data.secret)
                    if not won:
                        segment = await talk.turn("No.")
            talk.trace.record_reward("won", float(won))

        async def finalize(self, task, episode):
            episode.traces[0].metrics["finalized"] = 1

    class GuessTaskset(vf.Taskset):
        task_class, bounded = GuessTask, False

        def load(self):
            number = 0
            while True:
                yield GuessTask(GuessData(secret=str(number)))
                number += 1

    __all__ = ["GuessTaskset", "Guess"]
    """
PLAIN = """
    import verifiers.v1 as vf

    class PlainTask(vf.Task):
        {body}

    class Plain(vf.Taskset):
        task_class = PlainTask

        def load(self):
            yield PlainTask(vf.TaskData(prompt="x", {data}))

    __all__ = ["Plain"]
    """
TOOLS = "toolsets = classmethod(lambda cls, config: [vf.Model()])"
STOPS = "@vf.stop\n        def enough(self, trace): pass"
OLD = "import verifiers as vf\n\n"
# What stands in environment.toml behind the adapter's kind, the module, and what is refused.
MINE = 'taskset = "mine"\n'
REFUSED = {
    "container": (MINE, PLAIN.format(body="NEEDS_CONTAINER = True", data=""), "needs a container"),
    "image": (MINE, PLAIN.format(body="pass", data='image="python:3.12"'), "task 0 of .* image"),
    "tools": (MINE, PLAIN.format(body=TOOLS, data=""), "gives the model tools"),
    "stops": (MINE, PLAIN.format(body=STOPS, data=""), "acts on requests and replies .enough."),
    "endless": (MINE, GUESS, "yields tasks for ever"),
    "older function": (
        MINE,
        f"{OLD}def load_environment():\n    pass\n",
        "API of verifiers before 0.4 .it defines load_environment",
    ),
    "older class": (MINE, f"{OLD}Base = vf.SingleTurnEnv\n", "API of verifiers before 0.4"),
    "older module": (MINE, "from verifiers.envs import environment\n", "it imports verifiers.envs"),
    "no module": ('taskset = "nowhere"\n', SUMS, "neither nowhere.py in the folder nor a package"),
    "config": (f"{MINE}[adapter.config]\nrow = 3\n", SUMS, "mine'?: row: Extra inputs"),
    "answer": (f'{MINE}answer = "result"\n', SUMS, "no field 'result'"),
}


def with_taskset(name: str, more: str = "") -> str:
    return f'{TOML}taskset = "{name}"\n{more}'


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_an_answer_earns_what_the_rewards_of_its_task_give(packages, write_folder, start):
    toml = with_taskset("sums", 'answer = "answer"\n[adapter.config]\nrows = 3\n')
    process = start(write_folder(toml, {"sums.py": SUMS}), python=packages(PACKAGE))
    rows = process.tasks()
    assert process.describe()["kind"] == "single" and len(rows) == 3
    assert [message["role"] for message in rows[1]["prompt"]] == ["system", "user"]
    assert rows[1]["answer"][0]["content"] == "8"
    right, wrong = process.score(rows[1], "8"), process.score(rows[1], "9")
    assert (right["reward"], right["success"], wrong["reward"]) == (1.0, True, 0.5)
    assert right["parts"] == {"asked": [0.5, 1.0], "exact": [0.5, 1.0]}
    assert right["metrics"] == {"turns": 1.0, "hooks": 3.0}


def test_an_env_leads_the_conversation_and_its_last_word_is_the_reward(
    packages, write_folder, start
):
    folder = write_folder(with_taskset("guess", "size = 6\n"), {"guess.py": GUESS})
    process = start(folder, python=packages(PACKAGE))
    row = process.tasks()[5]
    assert process.describe()["kind"] == "multi"
    assert row["prompt"] == [{"role": "user", "content": "Begin."}]
    won, cut, silent, lost = (process.start(row) for _ in range(4))
    assert won.step(assistant("3")) == [{"role": "user", "content": "No."}]
    assert [bool(cut.step(assistant(text))) for text in "123"] == [True, True, False]
    assert won.step(assistant("5")) is None
    with pytest.raises(EpisodeFailed, match="invalid literal"):
        lost.step(assistant("five"))
    assert won.score()["metrics"] == {"turns": 2.0, "hooks": 3.0, "finalized": 1.0}
    assert (won.score()["reward"], cut.score()["reward"]) == (1.0, 0.0)
    assert silent.score()["reward"] == 0.0 and lost.score()["error"]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_played_is_refused_by_name(case: str, packages, write_folder, start):
    options, module, message = REFUSED[case]
    folder = write_folder(TOML + options, {"mine.py": module})
    with pytest.raises(EnvProblem, match=message) as refused:
        start(folder, python=packages(PACKAGE)).tasks()
    assert refused.value.code == "ENV_INVALID" and refused.value.hint
