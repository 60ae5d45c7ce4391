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
    """Start a child process that carries the run out, and wait for it. Returns its exit status.

    The child holds one end of a pipe, this process the other. So the child notices when this one is
    gone, and then ends the run in good order. `arguments` are ROOT HOME RUN LAUNCH.
    """
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
        """Pass the signal on, so that the run saves and ends."""
        child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_term)
    return child.wait()


def carry_out(lifeline: int, place: Place) -> int:
    """Carry out the launch whose folder is `place`, and end it when the driver is gone. Returns the
    exit status. `lifeline` is the read end of a pipe whose other end the driver holds."""
    side = NodeSide(place, place.job_name, "Ray")

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        """Let the run save and end."""
        side.told.set()

    def watch() -> None:
        """Wait until the driver is gone, then let the run save and end."""
        os.read(lifeline, 1)  # nothing is ever written: it returns when the driver is gone
        side.told.set()

    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGTERM, on_term)
    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    return side.run()


def main(arguments: list[str]) -> int:
    """Do what the arguments name and return the exit status.

    They are `--describe ROOT FILE` (write what the node has), ROOT HOME RUN LAUNCH (the driver), or
    `--carry-out LIFELINE` and then the same four (the driver's child).
    """
    if arguments[0] == "--describe":
        variables = job_environment()  # without Ray's own, such as the cluster's token
        os.environ.clear()
        os.environ.update(variables)
        _, root, file = arguments
        return node_side.describe(Path(root), Path(file))
    if arguments[0] != _CARRY_OUT:
        return stand_for(arguments)
    _, lifeline, root, home_id, run_id, launch = arguments
    return carry_out(int(lifeline), Place(Path(root), home_id, run_id, int(launch)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
