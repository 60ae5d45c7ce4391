"""An environment of a home asks the judge that config.toml names."""

from pathlib import Path

import pytest
from fake_endpoint import Said, fake_endpoint

from engine.environments.push import push_env
from engine.environments.registry import find_env, open_process, read_tasks
from engine.home.run_dir import Home
from envs.host.judge_budget import JudgeBudget

pytestmark = pytest.mark.timeout(60)  # a push with its audit, on busy cores
ENV = """
from envs import SingleTurnEnv, Task
from envs.judge import Criterion, Judge, Rubric

class Judged(SingleTurnEnv):
    rubric, judge = Rubric(Criterion("kind", "Is kind.")), Judge("openai:fake")
    def tasks(self):
        return [Task(str(n), f"Say {n}.", answer=str(n)) for n in range(4)]
    def score(self, task, completion):
        return self.rubric.score(task, completion, self.judge)

def load_environment():
    return Judged()
"""


def test_a_pushed_environment_asks_the_endpoint_that_it_lists_at_the_price_of_the_owner(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_KEY", "sk-fake-key-1")
    (tmp_path / "environment.py").write_text(ENV)
    (tmp_path / "environment.toml").write_text('endpoints = ["openai:fake"]\n')
    with fake_endpoint(lambda _: Said('{"kind": 0.5}')) as endpoint:
        endpoint.config(home, price_in=1e5, price_out=2e5)
        record = find_env(home, push_env(home, tmp_path, name="judged").env_id)
        assert record.audit and record.audit.judge, "the audit measured what one score takes"
        with open_process(record) as process:
            process.judge_budget = JudgeBudget()
            score = process.score(read_tasks(record)[0], "A new answer.")
            assert (score["reward"], score["error"]) == (0.5, None)
            used = process.judge_budget.used
            assert (used.calls, used.tokens, used.cost) == (1, 15, pytest.approx(2.0))
        assert set(endpoint.keys) == {"Bearer sk-fake-key-1"}
    texts = b"".join(path.read_bytes() for path in home.root.rglob("*") if path.is_file())
    assert b"sk-fake-key-1" not in texts
