"""A run's config is read as one typed record, and a damaged one names the key at fault."""

import json
from pathlib import Path

import pytest
from run_configs import train_config

from engine.records.record import DamagedRecord
from engine.records.run_config import DistillConfig, GRPOConfig, read_run_config

# What a config of 0.1.0 reads with for settings, and for keys beside them, that came later.
LATER_SETTINGS: dict[str, object] = {
    "top_k": 0,
    "min_p": 0.0,
    "vary_wording": 0.0,
    "curriculum": "none",
    "skill_rows": 200,
    "keep": 0.0,
    "keep_env": "",
    "keep_answers": "reference",
    "gpus": 1,
    "compute": "local",
    "shard_base": False,
    "score_workers": 1,
    "max_judge_calls": None,
    "max_judge_cost": None,
}
LATER: dict[str, object] = {
    "profile": False,
    "wall_limit_hours": None,
    "waits_for": [],
    "plan": None,
    "owner": "",
    "project": "",
    "priority": "normal",
}
GOLDEN = Path(__file__).parents[2] / "faults" / "golden" / "0.1.0" / "runs"


@pytest.mark.parametrize("run", sorted(path.name for path in GOLDEN.iterdir()))
def test_the_config_of_an_older_version_is_read_whole(run: str):
    config = read_run_config(GOLDEN / run / "config.json")
    stored = json.loads((GOLDEN / run / "config.json").read_text())
    assert isinstance(config, GRPOConfig)
    settings = stored["settings"] | LATER_SETTINGS
    estimate = stored["estimate"] | {
        "least_memory": 0,
        "gpus": 1,
        "judge_calls": 0.0,
        "judge_cost": 0.0,
    }
    estimate["peak_memory"] = stored["estimate"]["peak_memory"] | {"server": 0}
    assert config.to_json() == stored | LATER | {"settings": settings, "estimate": estimate}


@pytest.mark.parametrize("key", ["settings.learning_rate", "base.path", "env_id", "algorithm"])
def test_a_key_that_is_missing_is_named_with_its_file(tmp_path: Path, key: str):
    content = json.loads((GOLDEN / "sums-grpo-1" / "config.json").read_text())
    *above, last = key.split(".")
    place = content
    for name in above:
        place = place[name]
    place["renamed"] = place.pop(last)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedRecord) as damaged:
        read_run_config(path)
    assert last in damaged.value.message or "tag" in damaged.value.message
    assert str(path) in damaged.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_object_is_damaged_too(tmp_path: Path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DamagedRecord, match=r"config\.json is damaged"):
        read_run_config(path)


@pytest.mark.parametrize(
    "teacher",
    [
        {"kind": "local", "ref": "arith-grpo-7", "base_path": "/pebble", "adapter": None},
        {"kind": "endpoint", "url": "http://h/v1", "model": "m", "key_env": "TEACHER_KEY"},
    ],
)
def test_the_teacher_of_a_distillation_is_read_as_what_it_is(tmp_path: Path, teacher: dict):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(train_config(algorithm="distill", teacher=teacher)))
    config = read_run_config(path)
    assert isinstance(config, DistillConfig)
    assert config.teacher.to_json() == teacher
    assert config.model_refs == ["pebble"]
    path.write_text(json.dumps(train_config(algorithm="distill", teacher={"kind": "other"})))
    with pytest.raises(DamagedRecord, match="teacher"):
        read_run_config(path)
