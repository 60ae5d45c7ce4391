"""Tries the fast paths (faster ways to compute) whose names are given: `python -P -m
engine.worker.fast_paths NAME...`.

Writes one JSON object per line to stdout. The first is `identity`, which says what device and
versions the results hold for. Then each path writes `began` with its name, and `result` at its end;
a path with several parts also writes `doing` before each part. The device is that of
HONESMITH_DEVICE. The process ends when its stdin is closed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from engine.worker.core.runtime import prepare

prepare()

import torch

from engine.core.hardware import detect
from engine.home.run_dir import Home
from engine.machine.fast_paths.results import PathResult, identity_of
from engine.worker.components import quiet_libraries, set_threads
from engine.worker.fast_paths.collectives_trial import try_collectives
from engine.worker.fast_paths.trial import try_path
from engine.worker.fast_paths.trials import TRIALS
from engine.worker.fast_paths.vllm_trial import try_vllm
from engine.worker.network.policy import pick_device

AGAIN_S = 10.0  # a long part is written again after so many seconds, as a sign of life
# Paths that run in processes of their own, and have several parts.
IN_PARTS: Mapping[str, Callable[[torch.device, Callable[[str], None]], PathResult]] = {
    "vllm": try_vllm,
    "collectives": try_collectives,
}


def main(names: list[str]) -> None:
    """Try the paths with these names, in this order, and write what happens to stdout."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    quiet_libraries()
    set_threads()
    device = pick_device(os.environ.get("HONESMITH_DEVICE", "cpu"))
    _write_line({"identity": identity_of(detect().device, Home.locate())})
    for name in names:
        _write_line({"began": name})
        _write_line({"result": _try_one_path(name, device).to_json()})


def _try_one_path(name: str, device: torch.device) -> PathResult:
    """Try the fast path with this name on the device, and return its result. A path with several
    parts also reports each part to stdout."""
    if name in IN_PARTS:
        return IN_PARTS[name](device, _PartReporter().report)
    return try_path(name, TRIALS[name], device)


class _PartReporter:
    """Writes to stdout which of its parts a path is doing."""

    def __init__(self) -> None:
        """Begin with no part written."""
        self._last_part, self._written_at = "", 0.0

    def report(self, part: str) -> None:
        """Write `part`, unless it is the part last written; that is repeated only after AGAIN_S
        seconds."""
        now = time.monotonic()
        if part != self._last_part or now - self._written_at >= AGAIN_S:
            self._last_part, self._written_at = part, now
            _write_line({"doing": part})


def _write_line(line: object) -> None:
    """Write `line` as one line of JSON to stdout, for the process that started this one."""
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


def _exit_with_parent() -> None:
    """End this process as soon as its stdin is closed, because then the process that asked for the
    trials is gone."""
    # os.read and not sys.stdin: this thread would hold the lock of sys.stdin when Python exits.
    while os.read(0, 65536):  # 0: stdin; nothing is read once it is closed
        pass
    os._exit(1)  # a normal exit would end this thread alone


if __name__ == "__main__":
    main(sys.argv[1:])
