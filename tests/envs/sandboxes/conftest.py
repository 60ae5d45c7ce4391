"""Containers for stand-ins of providers."""

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Mapping[str, Any]], list[str]]:
    """What a provider, whose key is in `variable`, says is missing: without its package, with the
    package alone, and with both."""

    def of(provider: Any, variable: str, options: Mapping[str, Any]) -> list[str]:
        name = provider.__name__.rpartition(".")[2]
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        problems = [provider.problem(options)]
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        problems.append(provider.problem(options))
        monkeypatch.setenv(variable, "k")
        return [*problems, provider.problem(options)]

    return of
