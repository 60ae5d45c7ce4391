"""Datasets by hub id, against a server on the loopback."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments import data_inspection, push, registry
from engine.environments.registry import find_env
from engine.home.run_dir import Home
from engine.hub import data
from tests import hub_server
from tests.hub_server import COMMIT, Hub


def rows(word: str, count: int) -> bytes:
    lines = (
        json.dumps({"question": f"{word} {number}?", "answer": f"{number}"})
        for number in range(count)
    )
    return "".join(f"{line}\n" for line in lines).encode()


FILES = {
    "README.md": b"---\nlicense: mit\n---\n",
    "main/train-00000-of-00002.jsonl": rows("main-a", 30),
    "main/train-00001-of-00002.jsonl": rows("main-b", 30),
    "main/test-00000-of-00001.jsonl": rows("main-test", 20),
    "socratic/train.jsonl": rows("socratic", 9),
    "run.py": b"raise SystemExit('code of the hub was run')",
    "environment.py": b"raise SystemExit('code of the hub was run')",
}
CARD = {
    "license": "mit",
    "configs": [
        {
            "config_name": "main",
            "data_files": [
                {"split": "train", "path": "main/train-*"},
                {"split": "test", "path": ["main/test-*"]},
            ],
        },
        {"config_name": "socratic", "data_files": "socratic/*.jsonl"},
    ],
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub(dict(FILES))
    state.card = CARD
    with hub_server.serving(state, tmp_path / "shared-cache", monkeypatch):
        yield state


def fetch(home: Home, name: str) -> data.Dataset:
    ref = data.parse(name)
    assert ref is not None
    return data.fetch(home, ref, deadline=time.monotonic() + 10)


def refusal(home: Home, name: str, code: str = "DATASET_INVALID") -> UserError:
    with pytest.raises(UserError) as caught:
        fetch(home, name)
    assert caught.value.code == code
    return caught.value


def test_a_dataset_is_pushed_by_its_id_with_the_splits_of_its_card(home: Home, server: Hub):
    reply = push.push_env(home, "org/maths:main")
    assert reply.env_id.startswith("maths-main@")
    assert reply.rows == {"train": 60, "heldout": 20}
    assert reply.kind == "sft"
    assert f"From org/maths:main at {COMMIT[:12]} (licence: mit)" in reply.summary
    assert "1 other data file of it left out" in reply.summary
    record = find_env(home, reply.env_id)
    stored = registry.read_tasks(record, "heldout")
    prompts = {row["prompt"][0]["content"] for row in stored}
    assert "main-test 3?" in prompts and len(prompts) == 20


def test_nothing_of_a_dataset_but_its_data_files_is_fetched(home: Home, server: Hub):
    folder = fetch(home, "org/maths:main").folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "test-00002.jsonl",
        "train-00000.jsonl",
        "train-00001.jsonl",
    ]
    assert not any(path.endswith(".py") for path, _, _ in server.asked)


def test_a_dataset_that_is_there_is_not_fetched_again_and_serves_without_a_network(
    home: Home, server: Hub, monkeypatch: pytest.MonkeyPatch
):
    first = fetch(home, "org/maths:main")
    server.asked.clear()
    assert fetch(home, "org/maths:main") == first
    assert [path for path, _, _ in server.asked] == ["/api/datasets/org/maths/revision/main"]
    server.status = 503
    assert fetch(home, "org/maths:main") == first
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(home, "org/maths:main") == first
    assert "HF_HUB_OFFLINE" in refusal(home, "org/other").message


def test_a_subset_has_to_be_named_where_there_are_several(home: Home, server: Hub):
    error = refusal(home, "org/maths")
    assert "has 2 subsets: main, socratic" in error.message
    assert "org/maths:main" in str(error.hint)
    assert "no subset 'x'" in refusal(home, "org/maths:x").message


def test_without_a_card_folders_and_names_say_the_split(home: Home, server: Hub):
    server.card = None
    server.files = {
        "data/train/a.jsonl": rows("a", 3),
        "data/test/a.jsonl": rows("b", 2),
        "extra.csv": b"question,answer\n1,2\n",
        ".hidden/x.jsonl": rows("h", 1),
        "dataset_infos.json": b"{}",
    }
    dataset = fetch(home, "org/plain")
    names = sorted(path.name for path in dataset.folder.iterdir())
    assert names == ["heldout-00000.jsonl", "train-00001.jsonl"]
    assert dataset.origin.left_out == ("extra.csv",)
    assert "declares no subsets" in refusal(home, "org/plain:x").message


def test_a_repository_without_readable_data_is_refused_by_name(home: Home, server: Hub):
    server.card = None
    server.files = {"data.tar.gz": b"", "loader.py": b""}
    assert "no data files that can be read" in refusal(home, "org/archive").message


def test_a_dataset_that_the_hub_does_not_have_is_refused(home: Home, server: Hub):
    server.status = 404
    assert "does not exist" in refusal(home, "org/none").message
    server.status = 403
    assert "HF_TOKEN" in str(refusal(home, "org/none").hint)


def test_a_fetch_that_the_deadline_ends_goes_on_at_the_next_call(home: Home, server: Hub):
    ref = data.parse("org/maths:main")
    assert ref is not None
    with pytest.raises(UserError) as caught:
        data.fetch(home, ref, deadline=time.monotonic() - 1)
    assert caught.value.code == "DATASET_READING" and caught.value.retryable
    fetch(home, "org/maths:main")
    # The part that had arrived is complete, so what is asked for begins behind it.
    size = len(FILES["main/train-00000-of-00002.jsonl"])
    assert any(span == f"bytes={size}-" for _, span, _ in server.asked)


def test_a_file_that_arrives_damaged_is_thrown_away(home: Home, server: Hub):
    listing = server.listing
    server.listing = lambda: listing().replace(b'"sha256": "', b'"sha256": "0')
    assert "checksum" in refusal(home, "org/maths:main").message
    server.listing = listing
    assert fetch(home, "org/maths:main").folder.is_dir()


def test_a_misspelt_folder_is_not_asked_of_the_hub(
    home: Home, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "envs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        push.push_env(home, "envs/arth")
    assert caught.value.code == "ENV_INVALID"
    assert not server.asked
    server.status = 404
    with pytest.raises(UserError) as caught:
        push.push_env(home, "org/none")
    assert "there is no file or folder 'org/none' here" in caught.value.message


def test_inspecting_a_dataset_describes_its_training_file_in_tokens(home: Home, server: Hub):
    report = data_inspection.inspect(home, "hf://datasets/org/maths:main", model="pebble")
    assert report.rows == 30 and report.shapes == {"question/answer": 30}
    assert report.tokens is not None and report.tokens.prompt["max"] > 0
    assert "of 3 files only train-00000.jsonl is described here" in report.warnings
    assert "licence: mit" in report.summary


@pytest.mark.parametrize("text", ["a/b.jsonl", "a", "/a/b", "a/b/c", "../a", "a/b.", "a\0/b"])
def test_a_path_is_no_dataset(text: str):
    assert data.parse(text) is None
