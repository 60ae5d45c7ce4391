"""Models for which the base of a run may be taken: those that had its name before, and those of
this machine that have its configuration and its vocabulary. They count if their weights differ.

A gain that is shown from a tuned copy of a known model is a gain of whoever tuned the copy, unless
it is said what the run began with.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.core.files import JsonObject, read_object
from engine.home.hashes import fingerprint, weight_hashes
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.hub.repository import HUB_ID
from engine.models import hub, library
from engine.models.catalog import BUILTIN
from engine.records.manifest import Manifest, OtherWeights
from engine.records.record import DamagedRecord

_LOOK_BACK = 200  # newest training runs whose bases are looked at
_MOST = 4  # that are named
# Keys of config.json that say how it was written, not what the model computes.
_WRITING = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "model_name"}
)


def lookalikes(
    home: Home, ref: str, folder: Path, files: Mapping[str, str], run_id: str
) -> list[OtherWeights]:
    """The models with other weights for which the base of the run `run_id` may be taken: at most
    `_MOST`, each once.

    A built-in model and one of the hub have weights that are public under their name, so nothing is
    said of how they look.

    Args:
        ref: the reference of the base.
        folder: where it lies.
        files: the SHA-256 of its files, by name.
    """
    own_weights = fingerprint(files)
    others = list(_earlier_bases(home, ref, own_weights, run_id))
    is_public = ref in BUILTIN or HUB_ID.fullmatch(ref) is not None
    if not is_public:
        others += _models_alike(home, folder, own_weights)
    return others[:_MOST]


def _earlier_bases(home: Home, ref: str, own_weights: str, run_id: str) -> Iterator[OtherWeights]:
    """Yield the other weights that this reference had in earlier runs, among the last `_LOOK_BACK`
    runs, newest first. Weights that several runs had are yielded once, with the newest of them."""
    with Store(home) as store:
        rows = store.list_runs(_LOOK_BACK, kind="train")
    known_weights = {own_weights}
    for row in rows:
        if row.run_id == run_id:
            continue
        try:
            model = Manifest.read(home.run(row.run_id).manifest).model
        except (OSError, DamagedRecord):  # not started, deleted or damaged
            continue
        weights = fingerprint(model.files)  # "" if no weights were recorded
        if model.ref == ref and weights and weights not in known_weights:
            known_weights.add(weights)
            yield OtherWeights(ref=ref, weights=weights, run_id=row.run_id)


def _models_alike(home: Home, folder: Path, own_weights: str) -> Iterator[OtherWeights]:
    """The models of this machine with the configuration and the vocabulary of the one in `folder`,
    whose weights differ from `own_weights`, the SHA-256 that stands for them there."""
    model_config = _model_config(folder)
    known_weights = {own_weights}
    for ref, other_folder in _known_models(home):
        is_itself = other_folder.resolve() == folder.resolve()
        if is_itself or _model_config(other_folder) != model_config:
            continue
        if _vocabulary(other_folder) != _vocabulary(folder):
            continue
        weights = fingerprint(weight_hashes(home, other_folder))  # "" without weights
        if weights and weights not in known_weights:
            known_weights.add(weights)
            yield OtherWeights(ref=ref, weights=weights)


def _known_models(home: Home) -> Iterator[tuple[str, Path]]:
    """The models of this machine that have a name: (reference, folder)."""
    yield from BUILTIN.items()
    for name in library.names(home):
        folder = library.folder_of(home, name)
        if folder is not None:
            yield name, folder
    for repo in hub.cached_ids(home):
        folder = hub.cached(home, repo)
        if folder is not None:
            yield repo, folder


def _model_config(folder: Path) -> JsonObject:
    """The entries of a model's config.json that say what the model computes, without those that say
    how the file was written; {} without such a file."""
    config = read_object(folder / "config.json")
    return {name: value for name, value in config.items() if name not in _WRITING}


def _vocabulary(folder: Path) -> object:
    """The tokens of a model's tokenizer.json with their ids; None without such a file."""
    model = read_object(folder / "tokenizer.json").get("model")
    return model.get("vocab") if isinstance(model, dict) else None
