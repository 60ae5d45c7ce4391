"""`env audit --all` scores every row of a stored version, and its result is the version's audit."""

import json
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments import push_audit, registry
from engine.environments.push import push_env
from engine.home.run_dir import Home

pytestmark = pytest.mark.timeout(30)
ENV = """
from envs import Score, SingleTurnEnv, Task

class Doubling(SingleTurnEnv):
    def tasks(self):
        return [Task(str(n), f"What is twice {n}?", answer=str(2 * n)) for n in range(30)]
    def score(self, task, completion):
        right = completion == task.answer
        return Score(float(right), success=right)
    def score_group(self, task, completions):
        return [Score(float(c == task.answer)) for c in completions]

def load_environment():
    return Doubling()
"""


@pytest.fixture
def version(tmp_path: Path) -> tuple[Home, str]:
    folder = tmp_path / "doubling"
    folder.mkdir()
    (folder / "environment.py").write_text(ENV)
    home = Home.locate(tmp_path / "home")
    return home, push_env(home, str(folder), name="doubling", roots=[folder]).env_id


def test_every_row_is_scored_and_the_result_is_stored_with_the_version(
    version: tuple[Home, str],
):
    home, env_id = version
    pushed = registry.find_env(home, env_id)
    assert pushed.audit.groups.groups > 0 and pushed.audit.groups.moved == ()
    seen: list[tuple[int, int]] = []
    reply = push_audit.audit_all(
        home, env_id, workers=2, on_row=lambda done, of: seen.append((done, of))
    )
    assert seen[-1] == (30, 30) and "(30 of 30 rows scored)" in reply["summary"]
    audit = registry.find_env(home, env_id).audit
    assert (audit.rows_scored, audit.share, audit.verdict) == (30, 1.0, "ok")
    assert list((home.cache / "audits").glob("*.jsonl")) == []
    earlier = list((pushed.dir / registry.EARLIER).iterdir())
    assert json.loads(earlier[0].read_text())["seconds"] == pushed.audit.seconds
    assert push_audit.audit_reply(home, env_id)["audit"]["share"] == 1.0


def test_an_audit_under_way_is_not_begun_twice(version: tuple[Home, str]):
    home, env_id = version
    with (
        push_audit._lock_unfinished_scores(home, env_id),
        pytest.raises(UserError, match="already"),
    ):
        push_audit.audit_all(home, env_id)
