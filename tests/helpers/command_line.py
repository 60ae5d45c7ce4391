"""The command line called in this process, and verbs that only keep what they were given."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mcp_server.api import verbs
from mcp_server.cli.main import app


def call(*argv: str) -> Result:
    return CliRunner().invoke(app, list(argv))


def flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A verb's arguments, with those of its request in the request's place."""
    given = dict(arguments)
    return given | dict(vars(given.pop("request"))) if "request" in given else given


def spy(monkeypatch: pytest.MonkeyPatch, verb: str, reply: Any = None) -> list[dict[str, Any]]:
    """Put a verb that keeps its arguments in a verb's place."""
    seen: list[dict[str, Any]] = []
    bind = inspect.signature(getattr(verbs, verb))

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        seen.append(flat(bind.bind(*args, **kwargs).arguments))
        if isinstance(reply, Exception):
            raise reply
        return {"summary": f"{verb} done", "next": [], "warnings": []} | (reply or {})

    monkeypatch.setattr(verbs, verb, stand_in)
    return seen
