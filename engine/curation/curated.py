"""A curated dataset: chosen attempts and the held-out tasks they must not touch, pushed."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.curation.selection import Attempt
from engine.curation.sources import Source
from engine.environments import push, registry
from engine.environments.registry import EnvRecord
from engine.home.run_dir import Home
from engine.home.store import Store

CARD = "curation.json"
_ENVIRONMENT = '''"""Rows chosen from what models did; curation.json says from where and how."""

from pathlib import Path

from envs.dataset import DatasetEnv, data_files


def load_environment() -> DatasetEnv:
    return DatasetEnv(*data_files(Path(__file__).parent))
'''


def save_dataset(
    home: Home,
    name: str,
    kept: Sequence[Attempt],
    rows: Mapping[str, list[dict[str, Any]]],
    records: Mapping[str, EnvRecord],
    sources: Sequence[Source],
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """The dataset as a folder, pushed as a version."""
    several = len(records) > 1
    heldout = [
        _heldout_row(row, records[env], f"{env[:6]}/" if several else "")
        for env, found in rows.items()
        for row in found
        if row["split"] == "heldout"
    ]
    taken = {row["id"] for row in heldout}
    train = []
    for attempt in kept:
        prefix = f"{attempt.env_hash[:6]}/" if several else ""
        ident = _free_id(f"{prefix}{attempt.task}", taken)
        train.append(_train_row(attempt, records[attempt.env_hash], ident))
    card = {
        "made_by": "curate",
        **{key: value for key, value in asked.items() if key != "name"},
        "sources": [source.about() | {"files": source.files} for source in sources],
    }
    with tempfile.TemporaryDirectory(prefix=".curate-", dir=home.cache) as folder:
        place = Path(folder) / name
        (place / "datasets").mkdir(parents=True)
        (place / "environment.py").write_text(_ENVIRONMENT, "utf-8")
        (place / CARD).write_text(json.dumps(card, indent=1, sort_keys=True) + "\n", "utf-8")
        _write(place / "datasets" / "train.jsonl", train)
        if heldout:
            _write(place / "datasets" / "heldout.jsonl", heldout)
        return push.push_env(home, place, name=name)


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _train_row(attempt: Attempt, record: EnvRecord, ident: str) -> dict[str, Any]:
    """One kept attempt with where it came from; the whole conversation, as it was played."""
    origin = {
        "env_id": attempt.env_id,
        "task": attempt.task,
        "run": attempt.source,
        "model": attempt.model,
        "step": attempt.step,
        "attempt": attempt.member,
        "reward": attempt.reward,
    }
    row = {
        "id": ident,
        "split": "train",
        "prompt": attempt.prompt,
        "completion": attempt.messages,
        "metadata": {"origin": origin},
    }
    return row | ({"tools": record.tools} if record.tools else {})


def _heldout_row(row: Mapping[str, Any], record: EnvRecord, prefix: str) -> dict[str, Any]:
    """A held-out task as its environment has it: same id, prompt and reference answer."""
    text = row.get("text") or []
    after = row["gold"][len(row["prompt"]) :] if row.get("gold") else row.get("answer")
    made: dict[str, Any] = {"id": prefix + row["id"], "split": "heldout"}
    made["prompt"] = row["prompt"][0]["content"] if "prompt" in text else row["prompt"]
    if after:
        plain = "answer" in text and len(after) == 1
        made["completion"] = after[0]["content"] if plain else after
    made["metadata"] = {"origin": {"env_id": record.env_id, "task": row["id"]}}
    return made | ({"tools": record.tools} if record.tools else {})


def _free_id(wanted: str, taken: set[str]) -> str:
    """`task#1`, or the next number that no row has."""
    number = 1
    while f"{wanted}#{number}" in taken:
        number += 1
    taken.add(f"{wanted}#{number}")
    return f"{wanted}#{number}"


def free_name(home: Home, name: str) -> str:
    """A name that only curated datasets have: an environment must not turn into a dataset.

    Raises UserError BAD_ARGUMENT.
    """
    if not push.NAME.fullmatch(name):
        raise UserError(
            "BAD_ARGUMENT",
            f"{name[:60]!r} is no name for a dataset",
            hint='Use up to 40 of a-z, 0-9, dot, - and _, such as "arith-best".',
            field="name",
        )
    with Store(home) as store:
        held = [row for row in store.find_env(name) if row.name == name]
    if held and not (home.env(name, held[0].hash) / registry.SOURCE / CARD).is_file():
        raise UserError(
            "BAD_ARGUMENT",
            f"{name} is an environment already ({held[0].env_id})",
            hint=f'Choose a name of its own, such as "{name[:35]}-best".',
            field="name",
        )
    return name
