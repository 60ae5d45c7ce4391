"""Stands in for `engine.worker.smoke`: it stops where HONESMITH_TEST_SMOKE says, without torch."""

import os
import sys
import time
from pathlib import Path

from engine.core.files import append_line, write_json
from engine.home.run_dir import RunDir
from engine.records.run_result import SMOKE_SAVED


def main() -> int:
    run, stop_at = RunDir(Path(sys.argv[1])), os.environ["HONESMITH_TEST_SMOKE"]
    reached = ["load", "step 1", "step 2", "save", "read", "end"].index(stop_at.split(":")[0])
    now = time.time()
    if reached > 0:
        append_line(run.events, {"time": now, "event": "started", "message": ""})
    for step in (1, 2)[: max(0, reached - 1)]:
        append_line(run.metrics, {"step": step, "time": now, "loss": 1.0})
    if reached > 3:
        append_line(run.events, {"time": now, "event": SMOKE_SAVED, "message": ""})
    if stop_at.endswith(":hang"):
        time.sleep(60)
    if stop_at.endswith(":die"):
        return 9
    failure = {"kind": "nonfinite", "message": "It broke.", "evidence": "nan", "hint": "Mend it."}
    write_json(run.failure, failure)
    return 3


if __name__ == "__main__":
    sys.exit(main())
