"""Tries the fast paths whose names are given: `python -P -m engine.worker.fast_paths NAME...`.

Writes a JSON object on a line of stdout for each thing that happens: first `identity`, what the
results hold for; then for each path `began`, its name, and `result`; between these, of a path with
several parts, `doing`. The device is that of HONESMITH_DEVICE. Ends when its stdin does.
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
from engine.fast_paths.results import PathResult, identity_of
from engine.home.run_dir import Home
from engine.worker.components import quiet_libraries, set_threads
from engine.worker.fast_paths.collectives_trial import try_collectives
from engine.worker.fast_paths.trial import try_path
from engine.worker.fast_paths.trials import TRIALS
from engine.worker.fast_paths.vllm_trial import try_vllm
from engine.worker.network.policy import pick_device

AGAIN_S = 10.0  # a part that takes long is named so often, as a sign of life
# Paths that run in processes of their own, and have several parts.
IN_PARTS: Mapping[str, Callable[[torch.device, Callable[[str], None]], PathResult]] = {
    "vllm": try_vllm,
    "collectives": try_collectives,
}


def main(names: list[str]) -> None:
    """Try the paths of these names, in their order."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    quiet_libraries()
    set_threads()
    device = pick_device(os.environ.get("HONESMITH_DEVICE", "cpu"))
    _tell({"identity": identity_of(detect().device, Home.locate())})
    for name in names:
        _tell({"began": name})
        _tell({"result": _result(name, device).to_json()})


def _result(name: str, device: torch.device) -> PathResult:
    """Try one path."""
    if name in IN_PARTS:
        return IN_PARTS[name](device, _Parts().say)
    return try_path(name, TRIALS[name], device)


class _Parts:
    """Tells what a path with several parts is doing."""

    def __init__(self) -> None:
        self._last_part, self._written_at = "", 0.0

    def say(self, part: str) -> None:
        """Tell the part; the same again only every `AGAIN_S` seconds."""
        now = time.monotonic()
        if part != self._last_part or now - self._written_at >= AGAIN_S:
            self._last_part, self._written_at = part, now
            _tell({"doing": part})


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
