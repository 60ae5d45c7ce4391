"""Stands in for the worker of a probe: writes the result that HONESMITH_TEST_PROBE holds.

While the file named by HONESMITH_TEST_HOLD is missing, it waits.
"""

import json
import os
import sys
import time
from pathlib import Path

from engine.core.files import read_json, write_json
from engine.home.run_dir import RunDir
from engine.home.store import Store


def main() -> int:
    run = RunDir(Path(sys.argv[1]))
    config = read_json(run.config)
    with Store(run.home) as store:
        store.set_state(run.id, "running", only_from={"preparing"}, started=time.time())
    hold = os.environ.get("HONESMITH_TEST_HOLD")
    while hold and not Path(hold).exists():
        time.sleep(0.01)
    result = json.loads(os.environ["HONESMITH_TEST_PROBE"])
    if not result:
        write_json(run.failure, {"kind": "reward", "message": "score raised", "hint": "mend it"})
        return 3
    write_json(run.result, result | {"tasks": config["samples"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
