"""What a push says of data files and their scorers."""

import json
from pathlib import Path

from engine.environments.push import push_env
from engine.environments.registry import find_env
from engine.home.run_dir import Home


def test_data_without_a_scorer_names_the_word_that_fits_and_with_it_is_scored(
    home: Home, tmp_path: Path
):
    folder = tmp_path / "parts"
    folder.mkdir()
    rows = [{"prompt": f"Split w{n}-{n}.", "answer": f"[w{n}][{n}]"} for n in range(120)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    bare = push_env(home, folder)
    assert bare.kind == "sft" and bare.summary.endswith("sft, no scorer.")
    assert 'scorer = "exact" in environment.toml' in bare.problems[0].message
    (folder / "environment.toml").write_text('scorer = "exact"\n')
    scored = push_env(home, folder)
    assert scored.kind == "single" and scored.summary.endswith("scored by exact, audit ok.")
    assert scored.problems == [] and find_env(home, scored.env_id).version.scorer == "exact"
    assert scored.next[0].arguments == {"env_id": scored.env_id, "algorithm": "sft"}
