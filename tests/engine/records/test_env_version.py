"""env.json: what is written, and what older releases wrote."""

from pathlib import Path

import pytest

from engine.core.files import read_json, write_json
from engine.records.env_version import EnvVersion
from engine.records.record import DamagedRecord
from envs.config.settings import Limits

GOLDEN = Path(__file__).parents[2] / "faults/golden/0.1.0/envs/sums/0123456789ab"
LEAST = {
    "kind": "single",
    "scored": True,
    "tools": [],
    "rows": {"train": 1},
    "limits": {"call_seconds": 3.0, "of_another_release": 1},
    "secrets": ["KEY"],
}


def test_a_version_of_an_older_release_is_read():
    version = EnvVersion.read(GOLDEN / "env.json")
    assert (version.kind, version.rows) == ("single", {"train": 40, "heldout": 20})
    assert version.limits == Limits() and version.warnings == () and version.python == ""


def test_limits_of_another_release_are_read_as_far_as_they_are_known(tmp_path: Path):
    write_json(tmp_path / "env.json", LEAST)
    assert EnvVersion.read(tmp_path / "env.json").limits == Limits(call_seconds=3.0)


def test_what_is_written_keeps_its_order_and_is_read_back(tmp_path: Path):
    version = EnvVersion.model_validate(LEAST | {"params": {"x": [1, {"y": 2.5}]}})
    version.write(tmp_path / "env.json")
    assert EnvVersion.read(tmp_path / "env.json") == version
    keys = list(read_json(tmp_path / "env.json"))
    assert keys[:5] == ["env_id", "name", "hash", "digest", "kind"]
    assert keys[-4:] == ["python", "isolation", "warnings", "problems"]


@pytest.mark.parametrize("key", sorted(LEAST))
def test_a_key_that_is_missing_is_named(tmp_path: Path, key: str):
    write_json(tmp_path / "env.json", {name: LEAST[name] for name in LEAST if name != key})
    with pytest.raises(DamagedRecord, match=rf"env\.json is damaged: {key}"):
        EnvVersion.read(tmp_path / "env.json")
