"""The program that says where a model is served."""

import json

import pytest

from engine.home.run_dir import Home
from engine.machine.processes import deployments
from engine.serving import locate


def test_it_starts_a_deployment_once_and_says_where_it_answers(
    home: Home, server, capsys: pytest.CaptureFixture[str]
):
    locate.main(str(home.root), "pebble", "20")
    locate.main(str(home.root), "pebble", "20")
    first, again = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    (row,) = deployments.living(home)
    assert first == again == {"url": row.url, "key": first["key"]}
    assert first["key"] == home.deployment(row.deployment_id).key.read_text().strip()


def test_it_says_why_nothing_is_served(home: Home, server, capsys: pytest.CaptureFixture[str]):
    server("fail")
    locate.main(str(home.root), "pebble", "20")
    assert json.loads(capsys.readouterr().out)["code"] == "DEPLOY_FAILED"
