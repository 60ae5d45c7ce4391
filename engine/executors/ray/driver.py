"""What Ray starts on a node: `python -P -m engine.executors.ray.driver ROOT HOME RUN LAUNCH`.

The driver only stands for the run. Ray kills drivers without time to save, and where the daemon of
a node dies, it kills what it started itself and leaves the rest. So a child in a session of its own
carries the run out, and ends it in good order as soon as the driver is gone.

Ray hands its own variables on to a driver, the token of the whole cluster among them: the child has
those of a short list alone. With `--describe FILE` it writes what the node has, and ends.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import engine
from engine.executors.cluster import node_side
from engine.executors.cluster.node_side import NodeSide
from engine.executors.cluster.place import Place
from engine.executors.far_side import job_environment

_CARRY_OUT = "--carry-out"


def stand_for(arguments: list[str]) -> int:
    """Start the child, and wait for its end; returns its exit status."""
    source = str(Path(str(engine.__file__)).parent.parent)
    read_end, write_end = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __spec__.name, _CARRY_OUT, str(read_end), *arguments],
        env={**job_environment(), "PYTHONPATH": source},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(read_end,),
    )
    os.close(read_end)
    os.set_inheritable(write_end, False)  # it closes with this process

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_term)
    return child.wait()


def carry_out(lifeline: int, place: Place) -> int:
    """Carry the run out, for as long as the driver holds the other end of `lifeline`; returns the
    exit status."""
    side = NodeSide(place, place.job_name, "Ray")

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        side.told.set()

    def watch() -> None:
        os.read(lifeline, 1)  # nothing is ever written: it returns when the driver is gone
        side.told.set()

    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGTERM, on_term)
    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    return side.run()


def main(arguments: list[str]) -> int:
    """Do what the arguments name; returns the exit status."""
    if arguments[0] == "--describe":
        variables = job_environment()
        os.environ.clear()
        os.environ.update(variables)
        return node_side.describe(Path(arguments[1]), Path(arguments[2]))
    if arguments[0] != _CARRY_OUT:
        return stand_for(arguments)
    _, lifeline, root, home_id, run_id, launch = arguments
    return carry_out(int(lifeline), Place(Path(root), home_id, run_id, int(launch)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
