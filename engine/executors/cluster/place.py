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
    """Where a launch lies.

    Attributes:
        root: the root of the connection.
        home_id: of the home that the run belongs to, at the other side.
        run_id: the run.
        launch: as what it was started.
    """

    root: Path
    home_id: str
    run_id: str
    launch: int

    @property
    def far_home(self) -> str:
        """The id of this launch's own home, as engine/executors/jobs.py takes it."""
        return f"{self.home_id}/{self.run_id}.{self.launch}"

    @property
    def path(self) -> Path:
        """The folder; as a home the launch's own."""
        return self.root / "homes" / self.far_home

    @property
    def run(self) -> RunDir:
        """The run's folder."""
        return Home(self.path).run(self.run_id)

    @property
    def envs(self) -> Path:
        """The versions of environments that all launches of the home share."""
        return self.root / "homes" / self.home_id / "envs"

    @property
    def job_name(self) -> str:
        """Of the job: whoever goes on after a crash finds it by this."""
        return f"{name_prefix(self.home_id)}{self.run_id}-{self.launch}"

    @property
    def order(self) -> Path:
        """What the job is to do; by the login side. Without it there is no launch."""
        return self.path / "order.json"

    @property
    def secrets(self) -> Path:
        """Variables for the job; by the login side, removed by the job when it has read them."""
        return self.path / "secrets.json"

    @property
    def submitted(self) -> Path:
        """The job's id, "" before sbatch has answered; by the login side."""
        return self.path / "submitted.json"

    @property
    def submit_lock(self) -> Path:
        """A lock file, held while the job is submitted."""
        return self.path / "submit.lock"

    @property
    def stop(self) -> Path:
        """Exists once the run is to end; holds why and since when. By the login side."""
        return self.path / "stop.json"

    @property
    def claim(self) -> Path:
        """Which job runs this launch; by that job, created and never replaced."""
        return self.path / "claim.json"

    @property
    def beat(self) -> Path:
        """What the run is doing; by the job, again and again."""
        return self.path / "beat.json"

    @property
    def ended(self) -> Path:
        """How the run ended, and the sizes of all its files; the last that the job writes."""
        return self.path / "ended.json"

    @property
    def output(self) -> Path:
        """What the job's own program printed."""
        return self.path / "job.log"


def name_prefix(home_id: str) -> str:
    """How the names of all jobs of a home begin."""
    return f"hs-{home_id[:6]}-"


def places(root: Path, home_id: str, run_id: str = "") -> list[Place]:
    """Every launch of a home that has a folder, of one run with `run_id`; by launch."""
    folder = root / "homes" / home_id
    launches = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _LAUNCH.fullmatch(path.name)
        if match and (not run_id or match[1] == run_id):
            launches.append(Place(root, home_id, match[1], int(match[2])))
    return sorted(launches, key=lambda place: (place.run_id, place.launch))


def of_job(root: Path, home_id: str, name: str) -> Place | None:
    """The launch that a job with this name is of; None where it is none of this home's."""
    if not name.startswith(name_prefix(home_id)):
        return None
    run_id, _, launch = name.removeprefix(name_prefix(home_id)).rpartition("-")
    return Place(root, home_id, run_id, int(launch)) if run_id and launch.isdigit() else None
