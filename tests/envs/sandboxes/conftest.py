"""Containers for stand-ins of providers."""

from collections.abc import Iterator
from pathlib import Path

import mini_container
import pytest
from mini_container import MiniContainer


@pytest.fixture
def container(tmp_path: Path) -> Iterator[MiniContainer]:
    if not mini_container.possible():
        pytest.skip("no namespaces can be made here")
    made = MiniContainer(tmp_path / "container")
    yield made
    made.close()
