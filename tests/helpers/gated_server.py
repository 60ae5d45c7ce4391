"""A real deployment that samples no more tokens than a file allows: as slow as a test wants.

The file `tokens` in the home holds how many tokens may be sampled by this process altogether.
Everything else is the deployment itself: `stand_in(patch, server=...)` puts this script in its
place.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.home.run_dir import DeployDir
from engine.worker.serving import openai_server, own_models

LOOK_S = 0.01


def gated(sampler: Any, gate: Path) -> Any:
    """The sampler, whose `stream` waits before each token until the file `gate` allows it."""
    stream = sampler.stream
    sampled = 0

    def stream_slowly(*args: Any) -> Iterator[int]:
        nonlocal sampled
        for token in stream(*args):
            while sampled >= int(gate.read_text() or 0):
                threading.Event().wait(LOOK_S)
            sampled += 1
            yield token

    sampler.stream = stream_slowly
    return sampler


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_sampler = own_models.make_sampler
    allowed = DeployDir(folder).home.root / "tokens"
    own_models.make_sampler = lambda *args: gated(make_sampler(*args), allowed)
    sys.exit(openai_server.main(folder))
