"""The folder of a launch on the file system that login node and compute nodes share.

`homes/<id>/<run>.<launch>/` is a home of its own: its database is opened by the launch's job alone,
its `envs` leads to the versions of environments that all launches share. Beside it lie the files by
which login side and job speak, each written by one of them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from engine.home.run_dir import Home, RunDir

_LAUNCH = re.compile(r"(.+)\.(\d{1,9})")


@dataclass(frozen=True)
class Place:
    """The folder of one launch of a run (one start of it on the cluster), and the files in it.

    Attributes:
        root: the folder on the cluster's shared file system below which everything lies.
        home_id: the name there of the home that the run belongs to.
        run_id: the run.
        launch: the number of the launch, counted from 1.
    """

    root: Path
    home_id: str
    run_id: str
    launch: int

    @property
    def far_home(self) -> str:
        """The id of this launch's own home, as the functions of engine/executors/jobs.py take
        it."""
        return f"{self.home_id}/{self.run_id}.{self.launch}"

    @property
    def path(self) -> Path:
        """The launch's folder, which is also a home that holds this one run."""
        return self.root / "homes" / self.far_home

    @property
    def run(self) -> RunDir:
        """The run's folder in the launch's home."""
        return Home(self.path).run(self.run_id)

    @property
    def envs(self) -> Path:
        """The folder with the versions of environments, which all launches of the home share."""
        return self.root / "homes" / self.home_id / "envs"

    @property
    def job_name(self) -> str:
        """The name of the launch's job at the cluster, by which it is found again after a crash."""
        return f"{name_prefix(self.home_id)}{self.run_id}-{self.launch}"

    @property
    def order(self) -> Path:
        """The file that says what the job is to do. The login side writes it; without it there is
        no launch."""
        return self.path / "order.json"

    @property
    def secrets(self) -> Path:
        """The file with environment variables for the job. The login side writes it, the job
        deletes it when it has read it."""
        return self.path / "secrets.json"

    @property
    def submitted(self) -> Path:
        """The file with the job's id ("" before sbatch has answered). The login side writes it."""
        return self.path / "submitted.json"

    @property
    def submit_lock(self) -> Path:
        """The lock file that is held while the job is submitted."""
        return self.path / "submit.lock"

    @property
    def stop(self) -> Path:
        """The file that exists once the run is to end, with the reason and the time. The login side
        writes it."""
        return self.path / "stop.json"

    @property
    def claim(self) -> Path:
        """The file that says which job runs this launch. That job writes it, once."""
        return self.path / "claim.json"

    @property
    def beat(self) -> Path:
        """The file that says what the run is doing. The job writes it again and again, as a sign of
        life."""
        return self.path / "beat.json"

    @property
    def ended(self) -> Path:
        """The file that says how the run ended and how large its files are. The job writes it as
        the last thing."""
        return self.path / "ended.json"

    @property
    def output(self) -> Path:
        """The file with what the job's own program printed."""
        return self.path / "job.log"


def name_prefix(home_id: str) -> str:
    """Return the text with which the names of all jobs of a home begin at a cluster."""
    return f"hs-{home_id[:6]}-"


def places(root: Path, home_id: str, run_id: str = "") -> list[Place]:
    """List every launch of a home that has a folder below `root`, by run and then by number; with
    `run_id` only those of that run."""
    folder = root / "homes" / home_id
    launches = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _LAUNCH.fullmatch(path.name)
        if match and (not run_id or match[1] == run_id):
            launches.append(Place(root, home_id, match[1], int(match[2])))
    return sorted(launches, key=lambda place: (place.run_id, place.launch))


def place_of_job(root: Path, home_id: str, name: str) -> Place | None:
    """Return the launch that the job `name` at the cluster belongs to, or None if the name is not
    that of a job of this home. The launch's folder need not exist."""
    if not name.startswith(name_prefix(home_id)):
        return None
    run_id, _, launch = name.removeprefix(name_prefix(home_id)).rpartition("-")
    return Place(root, home_id, run_id, int(launch)) if run_id and launch.isdigit() else None
