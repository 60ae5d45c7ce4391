"""Which weights lay under the models of a run, and what follows where a name stands for others.

A training run has the hashes of its base in manifest.json, an evaluation those of all its bases in
bases.json. Both files are sealed with the run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.home.hashes import fingerprint, sha256, shown, then_and_now
from engine.home.run_dir import RunDir
from engine.models import hub
from engine.models.catalog import BUILTIN
from engine.records.manifest import BasesAsked, Manifest, ModelUsed, OtherWeights
from engine.records.record import DamagedRecord
from engine.records.run_config import EvaluateConfig, RunConfig, TrainConfig

# The files of a model's folder, beside its weights and templates, that decide what it answers. The
# index of weights only says which file holds which, so the same model may have another.
_PARTS = frozenset(hub.SMALL_FILES) - {"model.safetensors.index.json"}


def parts_of_model(files: Mapping[str, str]) -> dict[str, str]:
    """Those of a folder's hashes (file name -> SHA-256) that are of the model itself: its weights,
    configuration, vocabulary and templates."""
    return {
        name: digest
        for name, digest in files.items()
        if name in _PARTS or name.endswith((".safetensors", ".jinja"))
    }


def model_used(run_dir: RunDir) -> ModelUsed | None:
    """The base model of a training run, as its manifest has it. Returns None if there is no
    manifest, or if it cannot be read."""
    try:
        return Manifest.read(run_dir.manifest).model
    except (OSError, DamagedRecord):
        return None


def trained_base(run_dir: RunDir) -> str:
    """The SHA-256 that stands for the weights a training run began with; "" if not known."""
    model = model_used(run_dir)
    return fingerprint(model.files) if model else ""


@dataclass(frozen=True)
class BaseThen:
    """A base model as it was when a run asked it: its folder, and the SHA-256 that stands for its
    weights."""

    folder: str
    weights: str

    def was_swapped(self, other: "BaseThen") -> bool:
        """Whether two runs asked this folder with other weights in it."""
        return self.folder == other.folder and self.weights != other.weights


def base_then(run_dir: RunDir, ref: str) -> BaseThen | None:
    """The base model under the model `ref` at the time when a run asked it. For a training run it
    is the run's own base, for an evaluation the base of that model. Returns None if it was not
    recorded."""
    config = run_dir.find_config()
    folder, weights = "", ""
    if isinstance(config, TrainConfig):
        folder, weights = config.base.path, trained_base(run_dir)
    elif isinstance(config, EvaluateConfig):
        folders = [model.base_path for model in config.models if model.ref == ref]
        folder = folders[0] if folders else ""
        weights = fingerprint(_bases_asked(run_dir).get(folder, {}))
    if not folder or not weights:
        return None
    return BaseThen(folder, weights)


def base_warnings(run_dir: RunDir) -> list[str]:
    """A sentence for each model that may be taken for the base of a training run, although it has
    other weights. Returns [] if there is none, and for a run that is no training run."""
    model = model_used(run_dir)
    if model is None:
        return []
    return [_other_weights_sentence(model, other) for other in model.others]


def _other_weights_sentence(model: ModelUsed, other: OtherWeights) -> str:
    """Say that the base of a run has other weights than a model with which it has the name, or the
    configuration and vocabulary, in common."""
    own_base = f"The base {model.ref} (weights {shown(fingerprint(model.files))})"
    other_base = f"(weights {shown(other.weights)})"
    if other.run_id:
        return (
            f"{own_base} is not the model from which {other.run_id} was trained under this name "
            f"{other_base}: the two runs do not begin with one model."
        )
    return (
        f"{own_base} has the configuration and the vocabulary of {other.ref} {other_base} "
        "and other weights: one was trained further from the other. A gain is over this base "
        "alone, and what it was taught before is not known here, held-out tasks included."
    )


def changed_bases(run_dir: RunDir, config: RunConfig | None) -> Iterator[tuple[str, str]]:
    """The bases of a run that are no longer what they were: yields (reference or folder, what
    differs, such as "weights 12ab34cd56ef then, 98fe76dc54ba now").

    The files are read again, whatever the home remembers of them. A base that is gone, or whose
    weights are not downloaded, is left out: it cannot have been taken for another.
    """
    if isinstance(config, TrainConfig):
        model = model_used(run_dir)
        # A built-in model is read from this installation, as for every use of the run's model.
        folder = BUILTIN.get(config.base.ref) or Path(config.base.path)
        # Name of a base -> (its folder, the recorded SHA-256 of its files).
        recorded = {config.base.ref: (folder, model.files if model else {})}
    else:
        recorded = {
            folder: (Path(folder), weights) for folder, weights in _bases_asked(run_dir).items()
        }
    for name, (folder, files) in recorded.items():
        parts = parts_of_model(files)
        has_weights = any(folder.glob("*.safetensors"))
        if parts and has_weights:
            difference = then_and_now(parts, _hashes_now(folder, parts))
            if difference:
                yield name, difference


def _hashes_now(folder: Path, recorded: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256, by name, of those recorded files that the folder has now, and of all its weight
    files."""
    names = {*recorded, *(file.name for file in folder.glob("*.safetensors"))}
    files = [folder / Path(name).name for name in sorted(names)]
    return {file.name: sha256(file) for file in files if file.is_file()}


def _bases_asked(run_dir: RunDir) -> Mapping[str, dict[str, str]]:
    """The weights under the models of an evaluation: base folder -> file -> SHA-256. Returns {} if
    they were not recorded, or cannot be read."""
    try:
        return BasesAsked.read(run_dir.bases).weights
    except (OSError, DamagedRecord):
        return {}
