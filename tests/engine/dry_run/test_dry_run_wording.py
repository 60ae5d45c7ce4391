"""The check `wording` of a dry run."""

import json
from pathlib import Path
from typing import Any

from engine.dry_run import dry_run
from engine.environments.push import push_env
from engine.home.run_dir import Home

SHARED = {
    "messages": [{"role": "user", "content": "{n}?"}, {"role": "assistant", "content": "{n}"}],
    "tools": [{"type": "function", "function": {"name": "look", "description": "Looks."}}],
}


def test_rows_that_share_one_tool_text_are_a_warning_with_the_setting_that_varies_it(
    home: Home, tmp_path: Path
):
    def wording(folder: str, **settings: float) -> dict[str, Any]:
        env_id = push_env(home, str(tmp_path / folder), roots=[tmp_path]).env_id
        found = dry_run.dry_run(home, env_id, algorithm="sft", settings=settings)
        return next(check for check in found["checks"] if check["name"] == "wording")

    for folder, texts in (("one", ["Looks."]), ("two", ["Looks.", "Finds."])):
        (tmp_path / folder).mkdir()
        lines = []
        for n in range(120):
            row = json.loads(json.dumps(SHARED).replace("{n}", str(n)))
            row["tools"][0]["function"]["description"] = texts[n % len(texts)]
            lines.append(json.dumps(row) + "\n")
        (tmp_path / folder / "rows.jsonl").write_text("".join(lines))
    check = wording("one")
    assert check["status"] == "warn"
    assert "rows share one tool text: a change of it may break the model" in check["detail"]
    assert check["call"]["arguments"]["settings"] == {"vary_wording": 0.5}
    assert wording("one", vary_wording=0.5)["status"] == "pass"
    assert wording("two")["status"] == "pass"
