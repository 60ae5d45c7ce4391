"""The job on a node: `python -P -m engine.executors.cluster.node_side ROOT HOME RUN LAUNCH`.

It queues the run in the launch's own home, on the devices that the cluster gave it, and looks on:
the supervisor and the trainer are those of any run. It writes what is read from afar (place.py),
and ends the run when it is told to, by a file or by SIGTERM: before a time limit, or for another
job. With `--describe FILE` it writes what the node has, and ends.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_object, write_json
from engine.executors import jobs
from engine.executors.cluster.place import Place
from engine.home.rows import TERMINAL, RunRow
from engine.home.store import Store
from engine.machine.processes import launcher

EXIT_CLAIMED = 75  # another job runs this launch
LOOK_S = 1.0
BEAT_S = 3.0  # between two signs of life
_CLOCKS_S = 600.0  # that the clocks of two machines of a cluster may differ by


class NodeSide:
    """One job.

    Attributes:
        job: its name at the cluster; a job that is started anew keeps it.
        cluster: what kind of cluster gave the node.
        told: set when the cluster tells it to end.
    """

    def __init__(self, place: Place, job: str, cluster: str) -> None:
        self.place, self.job, self.cluster = place, job, cluster
        self.order = read_object(place.order)
        self.told = threading.Event()
        self.began = time.monotonic()
        self.beats = 0
        self.beat_at = -BEAT_S
        self.shown: JsonObject = {}

    def run(self) -> int:
        """Until the run has ended; returns the exit status of the job."""
        if not self._claim():
            return EXIT_CLAIMED
        place, order = self.place, self.order
        silent_s = time.time() - float(read_object(place.run.far("lease")).get("time", time.time()))
        if silent_s > float(order["lease_s"]) + _CLOCKS_S:
            self._end({"state": "failed", "reason_kind": "lease", "reason": _NO_WORD})
            return 0
        jobs.prepare(str(place.root), place.far_home, order["config_toml"], order["envs"])
        jobs.start(
            str(place.root),
            place.far_home,
            place.run_id,
            place.launch,
            order["row"],
            order["lease_s"],
            self._take_secrets(),
        )
        try:
            return self._look_on()
        except (OSError, UserError):
            if place.order.exists():
                raise
            return self._abandoned()

    def _look_on(self) -> int:
        """Until the run has ended, or its folder is gone; returns the exit status of the job."""
        place = self.place
        while place.order.exists():
            row = self._row()
            self._beat({"state": row.state, "device": row.device})
            if row.state in TERMINAL and not launcher.is_alive(place.run):
                self._end(jobs.end_of(row))
                return 0
            time.sleep(LOOK_S) if self.told.is_set() else self.told.wait(LOOK_S)
            # Before the dead are settled: one that was told to end is not started again.
            self._stop_if_told()
            launcher.reap(place.run.home)
        return self._abandoned()

    def _claim(self) -> bool:
        """Take this launch for this job; the same job takes it again where it is started anew.

        Returns False where another job has it.
        """
        if not self.order:  # it was taken back, or another launch is in its place
            return False
        aside = self.place.claim.with_name(f".claim-{self.job}")
        write_json(aside, {"job": self.job, "node": os.uname().nodename})
        with contextlib.suppress(FileExistsError):
            os.link(aside, self.place.claim)  # fails where it is there, on every shared file system
        aside.unlink(missing_ok=True)
        return read_object(self.place.claim).get("job") == self.job

    def _take_secrets(self) -> dict[str, str]:
        """Read the variables that were left for this job, and remove them."""
        secrets = read_object(self.place.secrets)
        self.place.secrets.unlink(missing_ok=True)
        return {str(name): str(text) for name, text in secrets.items()}

    def _row(self) -> RunRow:
        """The run's row."""
        with Store(self.place.run.home) as store:
            return store.get_run(self.place.run_id)

    def _beat(self, now: JsonObject) -> None:
        """Give a sign of life, and say what the run is doing."""
        since = time.monotonic() - self.beat_at
        if now == self.shown and since < BEAT_S:
            return
        self.beats += 1
        self.shown, self.beat_at = now, time.monotonic()
        spent_s = time.monotonic() - self.began
        beat = {"beat": self.beats, "spent_s": spent_s, "job": self.job}
        write_json(self.place.beat, {**now, **beat})

    def _stop_if_told(self) -> None:
        """End the run where somebody wants that."""
        asked = read_object(self.place.stop)
        if asked:
            self._stop(str(asked.get("reason", "")))
        elif self.told.is_set():
            self._stop(f"{self.cluster} ends its job")

    def _stop(self, reason: str) -> None:
        place = self.place
        jobs.stop(str(place.root), place.far_home, place.run_id, place.launch, reason)

    def _end(self, end: JsonObject) -> None:
        """Write how the run ended, as the last thing."""
        was_taken = self.told.is_set() and not self.place.stop.exists()
        files, _ = jobs.files_of(self.place.run)
        files.pop(self.place.run.far("lease").name, None)  # it is renewed from outside
        write_json(
            self.place.ended,
            {
                "end": end,
                "sizes": {path: facts[0] for path, facts in files.items()},
                # It did not end by itself, and nobody had asked for it: the cluster took it away.
                "taken": was_taken and end["state"] == "cancelled",
                "spent_s": time.monotonic() - self.began,
            },
        )

    def _abandoned(self) -> int:
        """End every process of a launch whose folder is gone: another launch is in its place."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return EXIT_CLAIMED


_NO_WORD = "the machine that started it gave no word while it waited for a node"


def describe(root: Path, file: Path) -> int:
    """Write what this node has, and whether our database can be kept on the shared file system."""
    described = jobs.describe(str(root))
    folder = file.with_suffix(".home")
    try:
        with Store(jobs.home_at(str(root), f"check/{folder.name}")) as store:
            store.list_runs(limit=1)
        described["database"] = ""
    except Exception as error:  # noqa: BLE001 - whatever it is, a run would meet it too
        described["database"] = str(error)[:500]
    write_json(file, {**described, "node": os.uname().nodename})
    return 0


def main(arguments: list[str]) -> int:
    """Run the job that the arguments name; returns its exit status."""
    if arguments[0] == "--describe":
        return describe(Path(arguments[1]), Path(arguments[2]))
    root, home_id, run_id, launch = arguments
    place = Place(Path(root), home_id, run_id, int(launch))
    side = NodeSide(place, os.environ.get("SLURM_JOB_ID", ""), "Slurm")

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        side.told.set()

    signal.signal(signal.SIGTERM, on_term)
    return side.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
