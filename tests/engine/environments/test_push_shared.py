"""A push of what somebody else has stored already."""

import textwrap
from pathlib import Path

import pytest
from doubles_env import DOUBLES

from engine.core.errors import UserError
from engine.environments.push import push_env
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.owners import Share, Viewer

pytestmark = pytest.mark.timeout(30)


def test_what_others_share_is_checked_before_it_becomes_ones_own(home: Home, tmp_path: Path):
    folder = tmp_path / "doubles"
    folder.mkdir()
    (folder / "environment.py").write_text(textwrap.dedent(DOUBLES))
    env_id = push_env(home, folder).env_id
    bob = Home(home.root, Viewer("bob", may="use"))
    with Store(home) as store:
        store.add_share(Share("env", env_id, "", "bob", "use"))

    def forbidden(_: object) -> None:
        raise UserError("FORBIDDEN", "no")

    with pytest.raises(UserError, match="no"):
        push_env(bob, folder, check_settings=forbidden)
    with Store(bob) as store:
        assert [row.owner for row in store.list_envs()] == [""], "it is his to use, and not his own"
    assert push_env(home, folder, check_settings=forbidden).env_id == env_id
