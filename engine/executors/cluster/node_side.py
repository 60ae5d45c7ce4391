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
LOOK_S = 1.0  # seconds between two looks at the run
BEAT_S = 3.0  # seconds between two signs of life
_CLOCKS_S = 600.0  # seconds by which the clocks of two machines of a cluster may differ


class NodeSide:
    """The job that carries out one launch of a run on a node of a cluster.

    Attributes:
        place: the launch's folder, through which this job and the other side speak.
        job: the job's name or id at the cluster; a job that is started anew keeps it.
        cluster: what kind of cluster gave the node, such as "Slurm".
        order: what the job is to do; {} if the launch was removed.
        told: set when the cluster tells the job to end.
        began: when the job began, on the monotonic clock.
        beats: how many signs of life were given.
        beat_at: when the last of them was given, on the monotonic clock.
        shown: what it said the run was doing.
    """

    def __init__(self, place: Place, job: str, cluster: str) -> None:
        """Read the job's order; nothing is started before `run`."""
        self.place, self.job, self.cluster = place, job, cluster
        self.order = read_object(place.order)
        self.told = threading.Event()
        self.began = time.monotonic()
        self.beats = 0
        self.beat_at = -BEAT_S  # so that the first sign of life is due at once
        self.shown: JsonObject = {}

    def run(self) -> int:
        """Carry the run out until it has ended. Returns the exit status of the job: 0, also if the
        run failed, or EXIT_CLAIMED if the launch is another job's or was replaced."""
        if not self._claim():
            return EXIT_CLAIMED
        place, order = self.place, self.order
        # The job may have waited for a node for longer than the lease lasts.
        renewed_at = float(read_object(place.run.far("lease")).get("time", time.time()))
        silent_s = time.time() - renewed_at
        if silent_s > float(order["lease_s"]) + _CLOCKS_S:
            self._write_end({"state": "failed", "reason_kind": "lease", "reason": _NO_WORD})
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
            return self._watch_run()
        except (OSError, UserError):
            if place.order.exists():
                raise
            return self._abandon()  # the error came from the removal of the launch's folder

    def _watch_run(self) -> int:
        """Give signs of life until the run has ended, or its folder is gone; end it if somebody
        wants that. Returns the exit status of the job."""
        place = self.place
        while place.order.exists():
            row = self._row()
            self._give_beat({"state": row.state, "device": row.device})
            if row.state in TERMINAL and not launcher.is_alive(place.run):
                self._write_end(jobs.end_of(row))
                return 0
            if self.told.is_set():
                time.sleep(LOOK_S)  # `wait` would return at once, again and again
            else:
                self.told.wait(LOOK_S)
            # Before `reap`, which starts a run again whose process has died: not this one, if it
            # was told to end.
            self._stop_if_told()
            launcher.reap(place.run.home)
        return self._abandon()

    def _claim(self) -> bool:
        """Claim this launch for this job. The same job may claim it again, if the cluster starts it
        anew. Returns False if another job has it, or the launch was removed."""
        if not self.order:
            return False
        aside = self.place.claim.with_name(f".claim-{self.job}")
        write_json(aside, {"job": self.job, "node": os.uname().nodename})
        with contextlib.suppress(FileExistsError):
            # On every shared file system a hard link fails if the file exists: one job wins.
            os.link(aside, self.place.claim)
        aside.unlink(missing_ok=True)
        return read_object(self.place.claim).get("job") == self.job

    def _take_secrets(self) -> dict[str, str]:
        """Read the environment variables that were left for this job, and delete their file."""
        secrets = read_object(self.place.secrets)
        self.place.secrets.unlink(missing_ok=True)
        return {str(name): str(text) for name, text in secrets.items()}

    def _row(self) -> RunRow:
        """Read the run's row from the database of the launch's own home."""
        with Store(self.place.run.home) as store:
            return store.get_run(self.place.run_id)

    def _give_beat(self, activity: JsonObject) -> None:
        """Write a sign of life with what the run is doing (`activity`: its state and device), if
        that has changed or the last sign is `BEAT_S` seconds old."""
        since_last_s = time.monotonic() - self.beat_at
        if activity == self.shown and since_last_s < BEAT_S:
            return
        self.beats += 1
        self.shown, self.beat_at = activity, time.monotonic()
        spent_s = time.monotonic() - self.began
        beat = {"beat": self.beats, "spent_s": spent_s, "job": self.job}
        write_json(self.place.beat, {**activity, **beat})

    def _stop_if_told(self) -> None:
        """Ask the run to save and end, if the other side (by a file) or the cluster (by a signal)
        has told this job to end it."""
        request = read_object(self.place.stop)
        if request:
            self._stop(str(request.get("reason", "")))
        elif self.told.is_set():
            self._stop(f"{self.cluster} ends its job")

    def _stop(self, reason: str) -> None:
        """Ask the run to save and end, for `reason`."""
        place = self.place
        jobs.stop(str(place.root), place.far_home, place.run_id, place.launch, reason)

    def _write_end(self, end: JsonObject) -> None:
        """Write how the run ended and how large its files are, as the last thing that this job
        writes. `end` is its end as `jobs.end_of` returns it."""
        was_taken = self.told.is_set() and not self.place.stop.exists()
        files, _ = jobs.files_of(self.place.run)
        files.pop(self.place.run.far("lease").name, None)  # it is renewed from outside
        write_json(
            self.place.ended,
            {
                "end": end,
                "sizes": {path: size for path, (size, _inode, _changed) in files.items()},
                # It did not end by itself, and nobody had asked for it: the cluster took it away.
                "taken": was_taken and end["state"] == "cancelled",
                "spent_s": time.monotonic() - self.began,
            },
        )

    def _abandon(self) -> int:
        """Kill every process of this launch, whose folder is gone because it was removed or another
        launch has taken its place. Returns the exit status of the job."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return EXIT_CLAIMED


_NO_WORD = "the machine that started it gave no word while it waited for a node"


def describe(root: Path, file: Path) -> int:
    """Write to `file` what this node has: its hardware, its packages, and in "database" why this
    program's database cannot be kept on the shared file system ("" if it can).

    `root` is the root of the connection on that file system. Returns the exit status 0.
    """
    described = jobs.describe(str(root))
    folder = file.with_suffix(".home")
    try:
        # A home only for this trial, whose database is opened and read.
        with Store(jobs.home_at(str(root), f"check/{folder.name}")) as store:
            store.list_runs(limit=1)
        described["database"] = ""
    except Exception as error:  # noqa: BLE001 - whatever it is, a run would meet it too
        described["database"] = str(error)[:500]
    write_json(file, {**described, "node": os.uname().nodename})
    return 0


def main(arguments: list[str]) -> int:
    """Run the job that the arguments name: `--describe ROOT FILE`, or ROOT HOME RUN LAUNCH. Returns
    its exit status."""
    if arguments[0] == "--describe":
        _, root, file = arguments
        return describe(Path(root), Path(file))
    root, home_id, run_id, launch = arguments
    place = Place(Path(root), home_id, run_id, int(launch))
    side = NodeSide(place, os.environ.get("SLURM_JOB_ID", ""), "Slurm")

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        """Let the run save and end."""
        side.told.set()

    signal.signal(signal.SIGTERM, on_term)
    return side.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
