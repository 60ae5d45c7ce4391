"""What was pushed may be pushed again from the home, and nothing else of it."""

import textwrap
from pathlib import Path

import pytest
from doubles_env import DOUBLES

from engine.core.errors import UserError
from engine.environments.push import push_env
from engine.environments.registry import find_env
from engine.home.run_dir import Home

pytestmark = pytest.mark.timeout(30)


def test_the_copy_of_a_version_may_be_pushed_again_and_the_rows_beside_it_not(
    home: Home, tmp_path: Path
):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "environment.py").write_text(textwrap.dedent(DOUBLES))
    pushed = push_env(home, tmp_path / "sums", roots=[tmp_path])
    record = find_env(home, pushed.env_id)
    again = push_env(home, str(record.source), name="sums", roots=[tmp_path / "sums"])
    assert again.env_id == pushed.env_id
    for place in (record.dir, home.envs, record.source / ".."):
        with pytest.raises(UserError) as refused:
            push_env(home, str(place), name="sums", roots=[tmp_path / "sums"])
        assert refused.value.code == "PATH_OUTSIDE_ROOTS"
