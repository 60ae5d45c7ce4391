"""The verbs tools and commands share."""

from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.home.run_dir import Home
from mcp_server.api import paths, verbs


def test_a_path_longer_than_a_file_system_takes_is_refused_by_name(
    home: Home, tmp_path: Path
) -> None:
    assert not paths.exists(Path("x" * 5000))
    assert paths.from_roots("x" * 5000, [tmp_path]) == "x" * 5000
    with pytest.raises(UserError):
        verbs.push_env(home, "x" * 5000, roots=[tmp_path])
