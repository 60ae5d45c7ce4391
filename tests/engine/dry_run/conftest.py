"""A machine that was measured, and environments stored as a push would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import stand_in

from engine.core import hardware
from engine.core.files import append_line, write_json
from engine.core.hardware import Device, Hardware
from engine.home.run_dir import Home
from engine.home.store import Store

GB = 1 << 30
LEARNABLE = {
    "effective": 0.5,
    "too_easy": 0.1,
    "too_hard": 0.4,
    "pass_at_k": {"1": 0.2, "8": 0.6},
    "truncated_share": 0.0,
    "error_share": 0.0,
}


@pytest.fixture(autouse=True)
def machine(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was measured, so that no probe of its speed is started."""
    rates = {"train_flops": 5e10, "sample_flops": 5e10, "update_s": 0.01, "decode_step_s": 0.002}
    write_json(home.speed, {"device": "cpu", "layers": 4} | rates)
    roomy = Hardware((Device("cpu", "CPU", "cpu", 16 * GB, 8 * GB),), 2, 16 * GB, 8 * GB, 99 * GB)
    monkeypatch.setattr(hardware, "detect", lambda *_: roomy)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stand_in(monkeypatch, trainer=Path(__file__).parents[1] / "fake_probe.py")
    monkeypatch.setenv("HONESMITH_TEST_PROBE", json.dumps(LEARNABLE))


@pytest.fixture
def add(home: Home) -> Callable[..., str]:
    """Stores a version as a push would; returns its id."""

    def add_version(name: str = "sums", **changes: Any) -> str:
        return add_env(home, name, **changes)

    return add_version


def add_env(
    home: Home,
    name: str,
    *,
    train: int = 200,
    heldout: int = 200,
    answer: str | None = "46",
    requirements: str = "",
    groups: int = 0,
    **changes: Any,
) -> str:
    """Store a version as a push would; `changes` are fields of env.json, `groups` is how many
    groups the rows of a side form (0: none). Returns its id."""
    folder = home.env(name, "0123456789ab")
    (folder / "source").mkdir(parents=True)
    (folder / "source" / "environment.py").write_text("def load_environment(): ...\n")
    if requirements:
        (folder / "source" / "requirements.txt").write_text(requirements)
    rows = {"train": train, "heldout": heldout}
    facts = {"name": name, "kind": "single", "scored": True, "tools": [], "rows": rows}
    facts |= {"limits": {}, "secrets": []}
    audit = changes.pop("audit", {"verdict": "ok", "headline": "ok: gold earns 1.00"})
    write_json(folder / "env.json", facts | changes)
    write_json(folder / "audit.json", audit)
    for split, count in rows.items():
        first = 400 if split == "heldout" else 0  # other sums than those that are trained on
        for number in range(count):
            prompt = [{"role": "user", "content": f"{split}: {first + number} + 12?"}]
            said = [] if answer is None else [{"role": "assistant", "content": answer}]
            gold = [*prompt, *said] if said else None
            row = {"id": f"{split}-{number}", "prompt": prompt, "split": split, "metadata": {}}
            if groups:
                row["group"] = f"{split}{number % groups}"
            append_line(folder / "tasks.jsonl", row | {"answer": said or None, "gold": gold})
    with Store(home) as store:
        return store.add_env(name, "0123456789ab", kind="single", info={"rows": rows}).env_id
