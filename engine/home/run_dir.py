"""Every path inside the home folder; engine/core/files.py writes and reads the files.

The home holds one database and the folders that grow: `runs/<id>/`, `envs/<name>/<hash>/` and more.
Nobody else spells a path inside it. The supervisor imports this: standard library only.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.core.errors import UserError
from engine.core.files import list_names
from engine.home.user_config import UserConfig, read_config

if TYPE_CHECKING:
    from engine.home.team.owners import Viewer
    from engine.records.run_config import RunConfig

FarRecord = Literal["placement", "place", "coming", "launch", "lease", "spent"]
_STEP_NAME = re.compile(r"step_?(\d+)")  # "step20" of a caller, "step_000020" of a folder
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
CHECKPOINT_MANIFEST = "MANIFEST.json"  # written last: a folder without it is no checkpoint


@dataclass(frozen=True)
class Home:
    """The folder that holds everything Honesmith keeps, as `viewer` sees it (None: all of it)."""

    root: Path
    viewer: "Viewer | None" = None

    @property
    def whole(self) -> "Home":
        """The home with everything in it, for what is done on behalf of no viewer."""
        return Home(self.root)

    @staticmethod
    def locate(path: str | Path | None = None) -> "Home":
        """Find the home: at `path`, at `HONESMITH_HOME`, or in the platform's folder for user data.

        Creates missing folders, readable only by this user. Raises UserError HOME_UNUSABLE.
        """
        chosen_path = path or os.environ.get("HONESMITH_HOME") or _default_home()
        root = Path(os.path.abspath(os.path.expanduser(chosen_path)))
        home = Home(root)
        try:
            if not root.is_dir():
                root.mkdir(mode=0o700, parents=True)
            for folder in (home.envs, home.runs, home.deployments, home.cache):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(
                "HOME_UNUSABLE",
                f"the home folder {root} cannot be used: {error.strerror or error}",
                hint="Point HONESMITH_HOME (or --home) at a folder this user can write.",
            ) from error
        return home

    @property
    def db(self) -> Path:
        """The SQLite database."""
        return self.root / "honesmith.db"

    @property
    def db_lock(self) -> Path:
        """A lock file: shared by all that have the database open, exclusive while it is mended."""
        return self.root / "db.lock"

    def damaged_database(self, stamp: str) -> Path:
        """Return the path to which a damaged database is moved at the time `stamp` (a text)."""
        return self.root / f"{self.db.name}.damaged-{stamp}"

    def damaged_databases(self) -> list[Path]:
        """Return the damaged databases that were moved aside, oldest first, without their logs."""
        paths = sorted(self.root.glob(f"{self.db.name}.damaged-*"))
        return [path for path in paths if not path.name.endswith(("-wal", "-shm"))]

    @property
    def config_file(self) -> Path:
        """The settings of the home's owner; the file is optional."""
        return self.root / "config.toml"

    @property
    def token(self) -> Path:
        """The bearer token of the owner, for the server over HTTP."""
        return self.root / "token"

    @property
    def keys(self) -> Path:
        """Digests of further bearer tokens, with what each may do."""
        return self.root / "keys.json"

    @property
    def keys_lock(self) -> Path:
        """A lock file, held while the keys are changed."""
        return self.cache / "keys.lock"

    def quota_lock(self, key: str) -> Path:
        """Return the lock file that is held while a call of `key` is checked against its quota."""
        return self.cache / f"quota-{key}.lock"

    @property
    def audit(self) -> Path:
        """The log of the calls that changed something, and who made them, one line each."""
        return self.root / "audit.jsonl"

    @property
    def checkpoint_lock(self) -> Path:
        """A lock file, held while the database's write-ahead log is moved into the database."""
        return self.root / "checkpoint.lock"

    @property
    def deploy_lock(self) -> Path:
        """A lock file, held while a deployment starts, so that only one starts at a time."""
        return self.root / "deploy.lock"

    @property
    def envs(self) -> Path:
        """The versions of environments: `envs/<name>/<hash>/`."""
        return self.root / "envs"

    @property
    def runs(self) -> Path:
        """The runs: `runs/<id>/`."""
        return self.root / "runs"

    @property
    def judges(self) -> Path:
        """Measured agreement of judges with gold labels, a file for each judge and rubric."""
        return self.root / "judges"

    @property
    def deployments(self) -> Path:
        """The deployments: `deployments/<id>/`."""
        return self.root / "deployments"

    @property
    def cache(self) -> Path:
        """The folder of what can be made or measured again."""
        return self.root / "cache"

    @property
    def models(self) -> Path:
        """The models that were fetched by name or imported, one folder each."""
        return self.root / "models"

    @property
    def chats(self) -> Path:
        """Conversations that `chat` can continue, one file each."""
        return self.root / "chats"

    @property
    def exports(self) -> Path:
        """The folder for exports for which no path was given."""
        return self.root / "exports"

    def export_job(self, key: str) -> Path:
        """Return the working folder of an export under way; `key` identifies the export."""
        return self.cache / "exports" / key

    @property
    def speed(self) -> Path:
        """The measured speed of this machine, from which estimates are made."""
        return self.cache / "speed.json"

    def smoke_run(self, token: str) -> "RunDir":
        """Return the folder of a smoke run (a short trial of a training), removed at its end."""
        return RunDir(self.cache / f"smoke-{token}")

    @property
    def comparisons(self) -> Path:
        """Results of comparing our own forward pass with that of transformers, by model."""
        return self.cache / "comparisons.json"

    @property
    def fast_paths(self) -> Path:
        """Results of trying which optional faster kernels work on the devices of this machine."""
        return self.cache / "fast-paths.json"

    @property
    def hosts(self) -> Path:
        """The folder of what is known of other machines, a file each, and this home's id there."""
        return self.root / "hosts"

    @property
    def page(self) -> Path:
        """The page of all runs and reports that `honesmith ui` wrote last."""
        return self.cache / "ui" / "index.html"

    def overlap(self, train_hash: str, heldout_hash: str) -> Path:
        """Return the file with the overlap of the training and held-out rows with these hashes."""
        return self.cache / "overlap" / f"{train_hash}-{heldout_hash}.json"

    @property
    def train_venv(self) -> Path:
        """The virtual environment with torch that `honesmith setup` builds, to train with."""
        return self.root / "venv"

    @property
    def train_python(self) -> Path:
        return self.train_venv / "bin" / "python"

    @property
    def vllm_venv(self) -> Path:
        """The virtual environment with vLLM that `honesmith setup --vllm` builds."""
        return self.root / "vllm-venv"

    @property
    def vllm_python(self) -> Path:
        return self.vllm_venv / "bin" / "python"

    def run(self, run_id: str) -> "RunDir":
        """Return the folder of a run, which need not exist."""
        return RunDir(self.runs / run_id)

    def env(self, name: str, hash12: str) -> Path:
        """Return the folder of the version `name@hash12` of an environment."""
        return self.envs / name / hash12

    def deployment(self, deployment_id: str) -> "DeployDir":
        """Return the folder of a deployment, which need not exist."""
        return DeployDir(self.deployments / deployment_id)

    def user_config(self) -> UserConfig:
        """Read and check `config.toml`. Raises UserError SETTING_UNKNOWN or SETTING_INVALID."""
        return read_config(self.config_file)


@dataclass(frozen=True)
class DeployDir:
    """The folder of one deployment: `deployments/<id>/`."""

    path: Path

    @property
    def home(self) -> Home:
        """The home that holds the deployment."""
        return Home(self.path.parent.parent)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """What the deployment was started with."""
        return self.path / "config.json"

    @property
    def key(self) -> Path:
        """The bearer token that requests to the deployment need."""
        return self.path / "key"

    @property
    def lock(self) -> Path:
        """A lock file, held by the process that serves the deployment."""
        return self.path / "lock"

    @property
    def alive(self) -> Path:
        """A lock file that the deployment's process holds, by inheritance, while it lives."""
        return self.path / "alive.lock"

    @property
    def process(self) -> Path:
        """The id of the deployment's process."""
        return self.path / "process.json"

    @property
    def log(self) -> Path:
        """The output of the server process."""
        return self.path / "server.log"

    @property
    def vllm_log(self) -> Path:
        """The output of vLLM, if the deployment uses it."""
        return self.path / "vllm.log"

    @property
    def adapters(self) -> Path:
        """Copies of the adapters that a vLLM server reads: a run may delete its checkpoints."""
        return self.path / "adapters"

    @property
    def ready(self) -> Path:
        """Exists once the deployment answers; holds its port and the names of its models."""
        return self.path / "ready.json"

    @property
    def failed(self) -> Path:
        """Exists if the deployment could not start; holds the reason."""
        return self.path / "failed.json"


@dataclass(frozen=True)
class RunDir:
    """The folder of one run: `runs/<id>/`."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def home(self) -> Home:
        """The home that holds the run."""
        return Home(self.path.parent.parent)

    @property
    def config(self) -> Path:
        """The request of the run, as the submit resolved it: settings, models, environment."""
        return self.path / "config.json"

    @property
    def manifest(self) -> Path:
        """Hashes and versions of what was trained, on what, and with what software."""
        return self.path / "manifest.json"

    @property
    def bases(self) -> Path:
        """The SHA-256 of the weights under the models of an evaluation."""
        return self.path / "bases.json"

    @property
    def metrics(self) -> Path:
        """What was measured, a line for each step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened and when, a line for each event."""
        return self.path / "events.jsonl"

    @property
    def report(self) -> Path:
        """The report about the run, for people."""
        return self.path / "report.html"

    @property
    def status_md(self) -> Path:
        """The run's state, step and last alert as text for people."""
        return self.path / "STATUS.md"

    @property
    def lock(self) -> Path:
        """A lock file that the supervisor, and by inheritance the trainer, hold while they live."""
        return self.path / "worker.lock"

    @property
    def started_record(self) -> Path:
        """When the latest attempt began, written by the supervisor."""
        return self.path / "started.json"

    @property
    def exit_record(self) -> Path:
        """How the latest attempt ended, written by the supervisor."""
        return self.path / "exit.json"

    @property
    def result(self) -> Path:
        """The result of a run that is done, written by its worker."""
        return self.path / "result.json"

    @property
    def failure(self) -> Path:
        """Why a run failed, written by its worker."""
        return self.path / "failure.json"

    @property
    def chain(self) -> Path:
        """The seal of a finished run: hashes of everything its verdict rests on."""
        return self.path / "chain.json"

    @property
    def contamination(self) -> Path:
        """Which held-out tasks also occur in training rows of the run's models; from submit."""
        return self.path / "contamination.json"

    @property
    def deleted(self) -> Path:
        """Exists if the run was deleted: its config and result are left, its large files gone."""
        return self.path / "deleted.json"

    @property
    def heartbeat(self) -> Path:
        """What the trainer is doing, and how long its work has taken; renewed while it lives."""
        return self.path / "heartbeat.json"

    @property
    def pins(self) -> Path:
        """The steps whose checkpoints the user keeps, whatever `keep_checkpoints` says."""
        return self.path / "pins.json"

    def far(self, name: FarRecord) -> Path:
        """Return the file of a record about the machine that the run is on, or that started it."""
        return self.path / f"{name}.json"

    @property
    def endpoint_calls(self) -> Path:
        """What models behind a URL answered and took, a line for each turn."""
        return self.path / "endpoint_calls.jsonl"

    @property
    def prompts(self) -> Path:
        """The prompts that a search tried, a line for each."""
        return self.path / "prompts.jsonl"

    @property
    def search(self) -> Path:
        """Where a search for a prompt keeps what it goes on from."""
        return self.path / "search"

    @property
    def rollouts_dir(self) -> Path:
        """The folder of the rollouts of training steps, a file for each step."""
        return self.path / "rollouts"

    @property
    def evals_dir(self) -> Path:
        """The folder of the answers in evaluations."""
        return self.path / "evals"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, a folder for each."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of the outputs of the run's processes."""
        return self.path / "logs"

    @property
    def supervisor_log(self) -> Path:
        """The output of the supervisor process, of all attempts."""
        return self.logs / "supervisor.log"

    @property
    def vllm_log(self) -> Path:
        """The log of the run's own vLLM server, of all attempts."""
        return self.logs / "vllm.log"

    @property
    def sampled_adapters(self) -> Path:
        """The versions of the adapter that a vLLM server reads while the run is under way."""
        return self.path / "sampled"

    @property
    def ranks(self) -> Path:
        """The folder through which the processes (ranks) of a run find each other."""
        return self.path / "ranks"

    def rank_sampled_adapters(self, rank: int) -> Path:
        """Return the `sampled_adapters` for the vLLM server of process `rank`, from 1 on."""
        return self.ranks / f"sampled_{rank}"

    def rank_vllm_log(self, rank: int) -> Path:
        """Return the `vllm_log` for the vLLM server of process `rank`, from 1 on."""
        return self.logs / f"vllm_rank_{rank}.log"

    @property
    def best(self) -> Path:
        """A relative symlink to the best checkpoint's folder, or a file with the folder's name."""
        return self.checkpoints / "best"

    @property
    def start_adapter(self) -> Path:
        """The run's own copy of the adapter it continues from."""
        return self.path / "start"

    def model_adapter(self, index: int) -> Path:
        """Return an evaluation's own copy of the adapter of model number `index` in its config."""
        return self.path / "models" / str(index)

    @property
    def teacher_adapter(self) -> Path:
        """A distillation's own copy of its teacher's adapter."""
        return self.path / "models" / "teacher"

    def rollouts(self, step: int) -> Path:
        """Return the file with the rollouts of a training step, a line each."""
        return self.rollouts_dir / f"step_{step:06d}.jsonl"

    def evals(self, step: int) -> Path:
        """Return the file with the answers of a training run's evaluation at a step, a line
        each."""
        return self.evals_dir / f"step_{step:06d}.jsonl"

    def kept(self, when: str) -> Path:
        """Return the file with answers to tasks of earlier skills, `when`: "before" or "after"."""
        return self.evals_dir / f"kept_{when}.jsonl"

    @property
    def replayed(self) -> Path:
        """The rows that the setting `keep` trains on again: right answers of the start model."""
        return self.path / "replayed.jsonl"

    @property
    def rescored(self) -> Path:
        """New scores, by a fresh env process, of some answers of the last evaluation."""
        return self.evals_dir / "rescored.json"

    def model_evals(self, index: int) -> Path:
        """Return the file with the answers of an evaluation's model `index`, a line each."""
        return self.evals_dir / f"model_{index}.jsonl"

    def reworded_evals(self, index: int, kind: str) -> Path:
        """Return the file with the answers of model `index` to tasks in other words of a `kind`."""
        return self.evals_dir / "reworded" / f"model_{index}_{kind}.jsonl"

    @property
    def reworded_kinds(self) -> Path:
        """How many tasks of an evaluation were asked in other words, by kind."""
        return self.evals_dir / "reworded" / "kinds.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step, which need not exist."""
        return self.checkpoints / f"step_{step:06d}"

    def log(self, attempt: int) -> Path:
        """Return the file with the console output of the trainer in one attempt."""
        return self.logs / f"attempt_{attempt}.log"

    def read_config(self) -> "RunConfig":
        """Read the run's config.json. Raises FileNotFoundError, or DamagedRecord naming the key."""
        # Imported late: pydantic would make the start of a supervisor a third longer.
        from engine.records.run_config import read_run_config  # noqa: PLC0415

        return read_run_config(self.config)

    def find_config(self) -> "RunConfig | None":
        """Read the run's config.json; return None if the file is missing or damaged."""
        from engine.records.run_config import find_run_config  # noqa: PLC0415  as above

        return find_run_config(self.config)

    def create(self) -> None:
        """Create the run's folder and the folders in it that every run has; keep existing ones."""
        for folder in (self.path, self.rollouts_dir, self.evals_dir, self.checkpoints, self.logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        names = list_names(self.checkpoints)
        complete = [n for n in names if (self.checkpoints / n / CHECKPOINT_MANIFEST).is_file()]
        return _steps_in(complete, _STEP_NAME)

    def latest_checkpoint(self) -> Path | None:
        """Return the folder of the newest complete checkpoint; None if there is none."""
        steps = self.checkpoint_steps()
        return self.checkpoint(steps[-1]) if steps else None

    def resolve_checkpoint(self, name: str = "") -> Path | None:
        """Return the folder of the complete checkpoint `name`; None if there is none.

        `name`: "" is the latest, "best" the best one, "step20" and "step_000020" that of step 20.
        """
        if name in ("", "best"):
            return self._best_checkpoint() if name else self.latest_checkpoint()
        match = _STEP_NAME.fullmatch(name)
        if match is None:
            return None
        folder = self.checkpoint(int(match.group(1)))
        return folder if (folder / CHECKPOINT_MANIFEST).is_file() else None

    def rollout_steps(self) -> list[int]:
        """Return the steps that have a file of rollouts, ascending."""
        return _steps_in(list_names(self.rollouts_dir), _STEP_FILE)

    def eval_steps(self) -> list[int]:
        """Return the steps that have a file of evaluation answers, ascending."""
        return _steps_in(list_names(self.evals_dir), _STEP_FILE)

    def _best_checkpoint(self) -> Path | None:
        """Return the folder of the best checkpoint; None if there is no complete one."""
        try:
            is_link = self.best.is_symlink()
            text = os.readlink(self.best) if is_link else self.best.read_text("utf-8").strip()
        except OSError:
            return None
        name = Path(text).name if is_link else text
        # A damaged `best` may hold any text. If it held "best", this would recurse for ever.
        return self.resolve_checkpoint(name) if _STEP_NAME.fullmatch(name) else None


def _steps_in(names: list[str], pattern: re.Pattern[str]) -> list[int]:
    """Return the steps, ascending, in those of the names that match `pattern` as a whole."""
    matches = [pattern.fullmatch(name) for name in names]
    return sorted(int(match.group(1)) for match in matches if match)


def _default_home() -> Path:
    """Return the platform's usual folder for user data."""
    import platformdirs  # noqa: PLC0415  takes 10 ms; only a process without a given home needs it

    return Path(platformdirs.user_data_dir("honesmith", appauthor=False))
