"""Known benchmarks by name: a dataset of the hub and the environment that scores it.

`benchmark:gsm8k` names one where a folder or a dataset can be named. The environments lie in
`envs/benchmarks`; the files of each dataset are fetched as in `data.py`.
"""

import difflib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import envs
from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.home.sanitize import one_line
from engine.hub import data
from engine.hub.data import Dataset, DatasetRef

PREFIX = "benchmark:"
_ENVIRONMENTS = Path(envs.__file__).parent / "benchmarks"
_FILE = "environment.py"
_SHOWN_CHARS = 60  # how much of an unknown name an error quotes


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and where its tasks come from.

    Attributes:
        repo, subset: the dataset on the hub; the subset is "" if the dataset has only one.
        train, heldout: the splits of the dataset that are trained on and evaluated on. If `train`
            is "", the environment is for evaluation only.
        environment: the folder of the environment in `envs/benchmarks`.
        about: what the tasks ask.
    """

    repo: str
    subset: str
    train: str
    heldout: str
    environment: str
    about: str

    @property
    def dataset(self) -> str:
        """The dataset as a user names it: `ORG/NAME` or `ORG/NAME:SUBSET`."""
        return f"{self.repo}:{self.subset}" if self.subset else self.repo


# If the answers of a test split are not published, the validation split is evaluated on instead.
# MMLU's training split consists of questions from other datasets, so its validation split is
# trained on.
BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "main", "train", "test", "number", "school word problems"),
    "aime-2024": Benchmark(
        "HuggingFaceH4/aime_2024", "", "", "train", "number", "30 contest problems"
    ),
    "math-500": Benchmark(
        "HuggingFaceH4/MATH-500", "", "", "test", "maths", "500 competition problems"
    ),
    "arc-easy": Benchmark(
        "allenai/ai2_arc", "ARC-Easy", "train", "test", "choice", "school science, easy"
    ),
    "arc-challenge": Benchmark(
        "allenai/ai2_arc", "ARC-Challenge", "train", "test", "choice", "school science, hard"
    ),
    "openbookqa": Benchmark(
        "allenai/openbookqa", "main", "train", "test", "choice", "elementary science"
    ),
    "commonsense-qa": Benchmark(
        "tau/commonsense_qa", "", "train", "validation", "choice", "everyday knowledge"
    ),
    "sciq": Benchmark("allenai/sciq", "", "train", "test", "choice", "science exams"),
    "mmlu": Benchmark("cais/mmlu", "all", "validation", "test", "choice", "57 subjects"),
    "hellaswag": Benchmark(
        "Rowan/hellaswag", "", "train", "validation", "choice", "how a scene goes on"
    ),
    "boolq": Benchmark("google/boolq", "", "train", "validation", "choice", "yes or no, passage"),
    "mbpp": Benchmark(
        "google-research-datasets/mbpp", "sanitized", "train", "test", "code", "Python functions"
    ),
}


def names_benchmark(path: str | Path) -> bool:
    """Tell whether `path` names a benchmark: it begins with "benchmark:"."""
    return str(path).startswith(PREFIX)


def named_benchmark(home: Home, path: str | Path, deadline: float) -> Dataset | None:
    """Fetch the benchmark that `path` names, as a folder with its environment and data. Returns
    None if `path` does not begin with PREFIX.

    Without a network, the version of the dataset that was fetched last is used.

    Args:
        deadline: value of `time.monotonic()` by which the call must end.

    Raises UserError BAD_ARGUMENT for an unknown benchmark; DATASET_INVALID, DATASET_READING or
    DISK_FULL if its dataset cannot be fetched.
    """
    if not names_benchmark(path):
        return None
    name = str(path).removeprefix(PREFIX)
    benchmark = _known_benchmark(name)
    splits = tuple(split for split in (benchmark.train, benchmark.heldout) if split)
    fetched = data.fetch(home, DatasetRef(benchmark.repo, benchmark.subset, splits), deadline)
    _check_splits(benchmark, splits, fetched)
    folder = _environment_folder(home, name, benchmark, fetched)
    return Dataset(folder, fetched.origin, name)


def _known_benchmark(name: str) -> Benchmark:
    """Return the benchmark of that name. Raises UserError BAD_ARGUMENT, listing all of them, if
    there is none."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    shown_name = one_line(name, _SHOWN_CHARS)
    close_names = difflib.get_close_matches(shown_name.lower(), BENCHMARKS, n=1)
    suggestion = f"; did you mean {PREFIX}{close_names[0]}?" if close_names else ""
    raise UserError(
        "BAD_ARGUMENT",
        f"there is no benchmark {shown_name!r}{suggestion}",
        hint=f"There are {', '.join(sorted(BENCHMARKS))}. Any other dataset of the hub can be "
        "pushed by its id.",
        field="path",
    )


def _check_splits(benchmark: Benchmark, splits: tuple[str, ...], fetched: Dataset) -> None:
    """Raise UserError DATASET_INVALID if one of the dataset's `splits` has no file among those
    `fetched`, because the environment would then lack its training or its held-out tasks."""
    sides = {_side(benchmark, file) for file in fetched.folder.iterdir()}
    missing = [name for name in splits if _side_of_split(benchmark, name) not in sides]
    if missing:
        raise UserError(
            "DATASET_INVALID",
            f"{benchmark.dataset} has no file of the split {missing[0]!r} in {fetched.folder}",
            hint=f"If files were deleted there, delete {fetched.folder.parent} too and push again; "
            "else the dataset has changed: push it by its id.",
            field="path",
        )


def _environment_folder(home: Home, name: str, benchmark: Benchmark, fetched: Dataset) -> Path:
    """Return the folder in the cache with the benchmark's environment and its data. The folder is
    made if it is missing or incomplete; its name combines the version of the dataset and a hash of
    the environment.

    Args:
        name: the benchmark's name.
        fetched: its dataset in the cache.
    """
    source = _ENVIRONMENTS / benchmark.environment / _FILE
    source_hash = hashlib.sha256(source.read_bytes()).hexdigest()
    folder_name = f"{fetched.origin.commit[:12]}-{source_hash[:12]}"
    folder = home.cache / "benchmarks" / name / folder_name
    # Name in the environment's folder -> the file of the dataset.
    files = {_file_name(benchmark, file): file for file in sorted(fetched.folder.iterdir())}
    if folder.is_dir():
        if _is_whole(folder, files):
            return folder
        shutil.rmtree(folder)  # files were deleted from it
    _make_environment(folder, source, files)
    return folder


def _make_environment(folder: Path, source: Path, files: Mapping[str, Path]) -> None:
    """Make an environment's folder from its code, the file `source`, and its data.

    `files` maps names in the folder's `datasets` to the files to put there. The folder is built
    under another name and then renamed, so that an interrupted push leaves no half folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        new_folder = Path(scratch) / "environment"
        (new_folder / "datasets").mkdir(parents=True)
        shutil.copyfile(source, new_folder / _FILE)
        for file_name, file in files.items():
            _link_or_copy(file, new_folder / "datasets" / file_name)
        if not folder.is_dir():  # another push may have made it meanwhile
            new_folder.rename(folder)


def _is_whole(folder: Path, data_files: Iterable[str]) -> bool:
    """Tell whether the environment in `folder` has its program and all these data files."""
    has_data = all((folder / "datasets" / name).is_file() for name in data_files)
    return has_data and (folder / _FILE).is_file()


def _file_name(benchmark: Benchmark, file: Path) -> str:
    """Return the file's name with "train" or "test" in place of its split, such as
    "test-00001.parquet" for "validation-00001.parquet". Whatever is not trained on counts as
    "test"."""
    number = file.stem.rpartition("-")[2]
    return f"{_side(benchmark, file)}-{number}{file.suffix}"


def _side(benchmark: Benchmark, file: Path) -> str:
    """Return "train" or "test" for a fetched file, by the split in the file's name, which looks
    like "validation-00001.parquet"."""
    return _side_of_split(benchmark, file.stem.rpartition("-")[0])


def _side_of_split(benchmark: Benchmark, split: str) -> str:
    """Return "train" for the split that is trained on, "test" for every other split."""
    return "train" if split == benchmark.train else "test"


def _link_or_copy(file: Path, target: Path) -> None:
    """Make `target` a hard link to `file`, so that the data take disk space only once. Copy the
    file if linking fails, as between two disks."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
