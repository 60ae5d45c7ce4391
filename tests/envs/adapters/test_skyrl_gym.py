"""Environments of SkyRL-Gym play rows of their form, over one turn and over several."""

import json

import pytest

from envs.host.process import EpisodeFailed

STAND_IN = {
    "omegaconf.py": """
        class OmegaConf:
            @staticmethod
            def create(options):
                return options
        """,
    "skyrl_gym/__init__.py": """
        REGISTERED = {}

        def register(id, entry_point):
            REGISTERED[id] = entry_point

        def make(id, **arguments):
            return REGISTERED[id](**arguments)
        """,
}
GAME = """
    import skyrl_gym

    class Guess:
        def __init__(self, env_config, extras):
            self.secret = int(extras["reward_spec"]["ground_truth"])
            self.paid, self.guesses = env_config["paid"], 0

        def init(self, prompt):
            return [{"role": "system", "content": "Guess."}, *prompt], {}

        def step(self, text):
            self.guesses += 1
            guess = int(text)
            done = guess == self.secret
            hint = "more" if guess < self.secret else "less"
            said = [] if done else [{"role": "user", "content": hint}]
            return {"observations": said, "reward": self.paid * done, "done": done, "metadata": {}}

        def get_metrics(self):
            return {"guesses": self.guesses, "name": "not a number"}

        def close(self):
            pass

    skyrl_gym.register(id="guess", entry_point=Guess)
    """
TOML = """
    [adapter]
    kind = "skyrl-gym"
    module = "game.py"
    config = { paid = 1.0 }
    """
ROWS = [
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": f"From 0 to 9, row {number}."}],
        "env_class": "guess",
        "reward_spec": {"method": "rule", "ground_truth": str(number)},
    }
    for number in range(4)
]


def test_a_row_is_played_to_the_reward_of_its_own_environment(packages, write_folder, start):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    files = {"game.py": GAME, "datasets/train.jsonl": lines, "datasets/test.jsonl": lines}
    process = start(write_folder(TOML, files), python=packages(STAND_IN))
    rows = process.tasks()
    assert process.describe()["kind"] == "multi"
    assert [row["split"] for row in rows] == ["heldout"] * 4 + ["train"] * 4
    assert [message["role"] for message in rows[3]["prompt"]] == ["system", "user"]
    episode, other = process.start(rows[3]), process.start(rows[1])
    assert episode.step({"role": "assistant", "content": "1"}) == [
        {"role": "user", "content": "more"}
    ]
    assert other.step({"role": "assistant", "content": "1"}) is None
    assert episode.step({"role": "assistant", "content": "3"}) is None
    won, first = episode.score(), other.score()
    assert (won["reward"], won["success"], won["metrics"]) == (1.0, True, {"guesses": 2.0})
    assert (first["reward"], first["metrics"]) == (1.0, {"guesses": 1.0})


def test_what_the_environment_cannot_read_costs_that_rollout_alone(packages, write_folder, start):
    files = {"game.py": GAME, "rows.json": json.dumps(ROWS)}
    process = start(write_folder(TOML, files), python=packages(STAND_IN))
    rows = process.tasks()
    lost, kept = process.start(rows[0]), process.start(rows[0])
    with pytest.raises(EpisodeFailed, match="invalid literal"):
        lost.step({"role": "assistant", "content": "zero"})
    assert kept.step({"role": "assistant", "content": "0"}) is None
    assert kept.score()["reward"] == 1.0
    assert lost.score()["error"]
