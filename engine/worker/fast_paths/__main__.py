"""Tries the fast paths whose names are given: `python -P -m engine.worker.fast_paths NAME...`.

Writes a JSON object on a line of stdout for each thing that happens: first `identity`, what the
results hold for; then for each path `began`, its name, and `result`. The device is that of
HONESMITH_DEVICE. Ends when its stdin does.
"""

import json
import os
import sys
import threading

from engine.worker.core.runtime import prepare

prepare()

from engine.core.hardware import detect
from engine.fast_paths.results import identity_of
from engine.worker.components import quiet_libraries, set_threads
from engine.worker.fast_paths.trial import try_path
from engine.worker.fast_paths.trials import TRIALS
from engine.worker.network.policy import pick_device


def main(names: list[str]) -> None:
    """Try the paths of these names, in their order."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    quiet_libraries()
    set_threads()
    device = pick_device(os.environ.get("HONESMITH_DEVICE", "cpu"))
    _tell({"identity": identity_of(detect().device)})
    for name in names:
        _tell({"began": name})
        _tell({"result": try_path(name, TRIALS[name], device).to_json()})


def _tell(line: object) -> None:
    """Write one line for whoever started this process."""
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


def _exit_with_parent() -> None:
    """End this process as soon as its stdin is closed: whoever asked for the trials is gone."""
    while os.read(0, 65536):  # not through sys.stdin, whose lock this thread would hold at the end
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
