"""Resolves model references: the built-in model, a folder, a hub id, or the adapter of a run.

`resolve_model` is used wherever a user can name a model. It reads only config.json and safetensors
headers, so it is quick and needs no torch. A model that cannot be trained here is refused, with the
reason, before anything is queued.
"""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import Reply, ReplyBase
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.user_config import Endpoint, refuse_to_load
from engine.hub.repository import HUB_ID
from engine.models import adapters, hub, library, model_files
from engine.models.known_models import KNOWN
from engine.models.library import GGUF
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records import model_origin
from engine.records.record import DamagedRecord
from engine.records.run_config import RunConfig, TrainConfig
from engine.records.settings import CommonSettings

__all__ = ["BUILTIN", "ModelFacts", "ModelRef", "resolve_model", "usable_models"]

BUILTIN: dict[str, Path] = {"pebble": Path(__file__).resolve().parents[1] / "pebble"}

# Runs that ended without a checkpoint: (home, the run's entry in `_run_versions`).
_ended_without_checkpoint: set[tuple[object, ...]] = set()
_RUN_REFERENCE = re.compile(r"(?P<run>[A-Za-z0-9][\w.-]*)(?:@(?P<checkpoint>best|step\d+))?")
_NAMED_STEPS = 6  # how many of the newest checkpoints an error message names


@dataclass(frozen=True)
class ModelRef:
    """A model reference and the model it stands for.

    Attributes:
        ref: the reference as it was given.
        kind: "builtin", "home", "path", "hub", "run", "adapter" (a folder or hub id of one), or
            "endpoint" (a model behind a URL).
        base_ref: the reference of the base model ("pebble", a name in the home, a path, a hub id).
        base_path: folder with config.json, weights and tokenizer. The weights of a hub model may
            still have to be downloaded (`hub.ensure_weights`).
        adapter: checkpoint folder in PEFT format; None for a base model.
        adapter_facts: shape of the adapter; None for a base model.
        run_id: the run of this home that trained the adapter; "" if no such run did.
        facts: sizes of the base model.
        endpoint: where the model answers, if it is behind a URL; else None. Such a model has the
            `facts` of the built-in model (used to count tokens), except for the longest context.
        waits_for: the run that is still to make the adapter; "" if the adapter exists. Until then
            `adapter` is None, and `adapter_facts` follow from the run's settings.
    """

    ref: str
    kind: str
    base_ref: str
    base_path: Path
    adapter: Path | None
    adapter_facts: AdapterFacts | None
    run_id: str
    facts: ModelFacts
    waits_for: str = ""
    endpoint: Endpoint | None = None


def resolve_model(home: Home, ref: str) -> ModelRef:
    """Find the model that `ref` names: the built-in `pebble`, a model stored in the home, the path
    of a folder or of a GGUF file, a hub id, or a training run: RUN (its newest checkpoint),
    RUN@best or RUN@stepN.

    A folder or hub id may hold an adapter in PEFT's format, whose config names the base model. A
    name with a slash is a path if such a folder exists, else a hub id.

    Raises UserError MODEL_NOT_FOUND if there is no such model, MODEL_UNSUPPORTED if it cannot be
    trained here, ADAPTER_MISMATCH if an adapter does not fit its base.
    """
    ref = ref.strip()
    refuse_to_load(ref)
    if not library.can_be_a_path(ref):
        raise _not_found(
            f"{ref[:60]!r}... cannot name a model: it is too long or has a NUL in it",
            "Give `pebble`, a folder (/path/to/model), a hub id (ORG/NAME) or a run id.",
        )
    run_and_checkpoint = None if ref in BUILTIN else _referenced_run(home, ref)
    if run_and_checkpoint is not None:
        run, checkpoint_name = run_and_checkpoint
        return _from_run(home, ref, run, checkpoint_name)
    location = _named_folder(home, ref)
    if adapters.is_adapter(location.folder):
        return _from_adapter(home, ref, location.folder)
    return _base_model(ref, location.kind, location.ref, location.folder)


@dataclass(frozen=True)
class _NamedFolder:
    """A folder that a reference names. `ref` is the reference as it is recorded: for a path, with
    its links resolved."""

    kind: str
    ref: str
    folder: Path


def _named_folder(home: Home, ref: str) -> _NamedFolder:
    """Find the folder of the model or adapter that `ref`, which is no run, names. A GGUF file is
    imported if necessary; a model of the hub is fetched without its weights.

    Raises the errors of `resolve_model`, such as UserError MODEL_NOT_FOUND.
    """
    if ref in BUILTIN:
        return _NamedFolder("builtin", ref, BUILTIN[ref])
    if (folder := library.folder_of(home, ref)) is not None:
        return _NamedFolder("home", ref, folder)
    if ref.endswith(GGUF):
        file = _gguf_file(ref)
        return _NamedFolder("path", str(file), library.from_file(home, file))
    folder = _local_folder(ref)
    if folder is not None:
        _refuse_inside(home, folder, ref)
        return _NamedFolder("path", str(folder), folder)
    if HUB_ID.fullmatch(ref):
        return _NamedFolder("hub", ref, hub.look_up(home, ref))
    raise _unknown_reference(home, ref)


def describe(home: Home, ref: str) -> Reply:
    """Return the facts of the model `ref`: its sizes, where it lies, where it came from.

    Raises the errors of `resolve_model`, such as UserError MODEL_NOT_FOUND.
    """
    model = resolve_model(home, ref)
    facts = model.facts
    origin = model_origin.read(model.base_path)
    reply: Reply = {
        "summary": f"{ref}: {facts.architecture}, {facts.params / 1e6:,.1f} million parameters.",
        "model": ref,
        "kind": model.kind,
        "architecture": facts.architecture,
        "params": facts.params,
        "context": facts.max_positions,
        "layers": facts.layers,
        "hidden": facts.hidden,
        "vocab": facts.vocab,
        "stored_as": facts.dtype,
        "thinking": facts.thinking,
        "origin": origin.sentence() if origin else "",
        "folder": str(model.base_path),
    }
    if model.adapter is not None and model.adapter_facts is not None:
        reply |= _adapter_fields(model.base_ref, model.adapter, model.adapter_facts)
    return reply


def _adapter_fields(base_ref: str, adapter: Path, facts: AdapterFacts) -> Reply:
    """Return the fields that `describe` adds for an adapter on `base_ref`; `adapter` is its
    folder."""
    return {
        "base": base_ref,
        "adapter": str(adapter),
        "lora_rank": facts.rank,
        "lora_targets": list(facts.targets),
    }


def check_in_sight(home: Home, ref: str) -> None:
    """Refuse a path without a usable model, for a caller who may not explore this machine.

    The message is the same whatever the reason, so it does not reveal which files exist. Nothing is
    checked if `ref` is no path (such as a run id), or is a hub id ORG/NAME and there is no folder
    ORG/NAME. Raises UserError MODEL_NOT_FOUND.
    """
    ref = ref.strip()
    if not library.is_written_as_path(ref):
        return
    if not library.can_be_a_path(ref):  # too long, or with a NUL: a URL of a teacher may be so
        raise _no_model_at(f"{ref[:60]}...")
    may_be_hub_id = not ref.endswith(GGUF) and HUB_ID.fullmatch(ref) is not None
    try:
        folder = _usable_local_folder(home, ref)
    # UserError: no folder, or no usable model in it. OSError: it may not be read. ValueError: a
    # name or a file that cannot be decoded. RuntimeError: "~" of an unknown user.
    except (UserError, OSError, ValueError, RuntimeError) as error:
        # The caller must not learn whether there is an unusable folder ORG/NAME or none. So this
        # raises what a hub id without such a folder gets, if the hub does not know it.
        if may_be_hub_id:
            hub.look_up(home, ref)
        raise _no_model_at(ref) from error
    if folder is None and not may_be_hub_id:  # `resolve_model` looks a hub id up afterwards
        raise _no_model_at(ref)


def _usable_local_folder(home: Home, ref: str) -> Path | None:
    """Return the folder of the model at the path `ref`; for a GGUF file, the folder it is imported
    into. Returns None if no folder has that path and `ref` may be a hub id.

    Raises UserError, OSError, ValueError or RuntimeError if the model cannot be used.
    """
    if ref.endswith(GGUF):
        folder = library.import_folder(home, _gguf_file(ref))
    else:
        folder = _local_folder(ref)
    if folder is None:
        return None
    if not ref.endswith(GGUF):
        _refuse_inside(home, folder, ref)
    # Called only for the errors they raise if the model cannot be used.
    if adapters.is_adapter(folder):
        resolve_model(home, str(folder))
    else:
        model_files.read_facts(folder)
    return folder


def _refuse_inside(home: Home, folder: Path, ref: str) -> None:
    """Raise UserError MODEL_NOT_FOUND if `folder` lies in the home and the home has a viewer (a
    member of a team). A path could lead into the run of another member; an own run has an id."""
    if home.viewer is not None and folder.is_relative_to(home.root.resolve()):
        raise _no_model_at(ref)


def _no_model_at(ref: str) -> UserError:
    """Return the error for a path without a usable model, which is the same for every reason."""
    return _not_found(f"no model is at {ref!r}", "Name a folder that holds a whole model.")


@dataclass(frozen=True)
class UsableModel(ReplyBase):
    """A model that can be named, as a listing shows it.

    Attributes:
        kind: builtin, home, hub or run.
        params: number of parameters of the base model.
        context: longest context in tokens.
        thinking: whether the chat template can switch a think block on and off.
        base, checkpoints, best: set for a run only: its base model, the steps of its checkpoints,
            and the folder name of the best one ("" if none is best).
        origin: set for a model of the home only: where it came from and how it was made.
    """

    ref: str
    kind: str
    params: int
    context: int
    thinking: bool
    base: str | None = None
    checkpoints: list[int] | None = None
    best: str | None = None
    origin: str | None = None


def usable_models(home: Home) -> list[UsableModel]:
    """List the models that can be used without a download.

    These are the built-in ones, those of this home, those in a local hub cache with all weights,
    and the adapters of runs, newest run first. Models that cannot be trained here are left out.
    """
    # Reference -> (kind, folder). If two models have the same name, the later one counts.
    folders = {ref: ("builtin", path) for ref, path in BUILTIN.items()}
    folders |= {name: ("home", home.models / name) for name in library.names(home)}
    folders |= {repo: ("hub", folder) for repo, folder in _cached_folders(home)}
    models = [_usable_base(ref, kind, path) for ref, (kind, path) in folders.items()]
    models += [_usable_run(run) for run in _runs_with_checkpoints(home)]
    return [model for model in models if model is not None]


def _cached_folders(home: Home) -> Iterator[tuple[str, Path]]:
    """Yield (hub id, folder) of each model that a local hub cache has with all its weights."""
    for repo in hub.cached_ids(home):
        folder = hub.cached(home, repo)
        if folder is not None:
            yield repo, folder


def _base_model(ref: str, kind: str, base_ref: str, path: Path) -> ModelRef:
    """Make the reference to a base model, `base_ref`, whose files are in the folder `path`.

    `ref` is the reference that led to the model, `kind` says what it names ("hub", "run", ...).
    Raises UserError MODEL_UNSUPPORTED if the model cannot be trained here.
    """
    return ModelRef(
        ref=ref,
        kind=kind,
        base_ref=base_ref,
        base_path=path,
        adapter=None,
        adapter_facts=None,
        run_id="",
        facts=model_files.read_facts(path),
    )


def _referenced_run(home: Home, ref: str) -> tuple[RunDir, str] | None:
    """Return the run of this home that `ref` names, and which checkpoint of it: "best", "stepN", or
    "" for the newest. Returns None if `ref` names no such run."""
    match = _RUN_REFERENCE.fullmatch(ref)
    if match is None:
        return None
    run = home.run(match["run"])
    if home.viewer is not None:  # a member of a team, who must not learn which other runs exist
        with Store(home) as store:
            if not store.sees_run(run.id):
                return None
    if not run.config.is_file():
        return None
    return run, match["checkpoint"] or ""


def unmade(home: Home, ref: str) -> ModelRef | None:
    """Return the model that a training run is still to make, if `ref` names a training run; else
    None.

    Checkpoints that the run has already made are not looked at. Raises UserError MODEL_NOT_FOUND if
    the files of the run's base model are gone.
    """
    run_and_checkpoint = None if ref in BUILTIN else _referenced_run(home, ref)
    if run_and_checkpoint is None:
        return None
    run, _ = run_and_checkpoint
    config = run.find_config()
    if not isinstance(config, TrainConfig):
        return None
    base_ref, base_path = _base_of(config, run)
    return made_by(_base_model(ref, "run", base_ref, base_path), run.id, config.settings)


def made_by(base: ModelRef, run_id: str, settings: CommonSettings) -> ModelRef:
    """Return the model that the training run `run_id` is still to make: `base` with an adapter of
    the shape that the run's settings give. The adapter has no files yet, so its folder is None."""
    shape = AdapterFacts(settings.lora_rank, settings.lora_alpha, tuple(settings.lora_targets))
    return replace(
        base, kind="run", adapter=None, adapter_facts=shape, run_id=run_id, waits_for=run_id
    )


def _from_run(home: Home, ref: str, run: RunDir, checkpoint_name: str) -> ModelRef:
    """Return the model that a training run made: an adapter on its base model.

    `checkpoint_name` is "best", "stepN", or "" for the newest. Raises the errors of
    `resolve_model`, such as MODEL_NOT_FOUND if there is no such checkpoint, and ADAPTER_MISMATCH if
    the base has other weights than the run was trained on.
    """
    config = _run_config(run)
    if not isinstance(config, TrainConfig):
        raise _not_found(
            f"{run.id} is no training run, so it left no model",
            "Name the run that was evaluated, or a base model.",
        )
    checkpoint = run.resolve_checkpoint(checkpoint_name)
    if checkpoint is None:
        raise _no_checkpoint(run, checkpoint_name)
    base_ref, base_path = _base_of(config, run)
    adapters.require_trained_base(run, base_path)
    base = _base_model(ref, kind="run", base_ref=base_ref, path=base_path)
    return replace(_with_adapter(base, checkpoint), run_id=run.id)


def _with_adapter(base: ModelRef, folder: Path) -> ModelRef:
    """Return `base` with the adapter in `folder`. Raises UserError ADAPTER_MISMATCH if it does not
    fit."""
    adapter = adapters.read_facts(folder, base.facts)
    adapters.require_fit(folder, adapter, base.facts)
    return replace(base, adapter=folder, adapter_facts=adapter)


def _from_adapter(home: Home, ref: str, folder: Path) -> ModelRef:
    """Return the model of the adapter in `folder` on the base model that the adapter names.

    The adapter may give its base several names; the first that leads to a model counts. Raises
    UserError MODEL_NOT_FOUND if none does, ADAPTER_MISMATCH if that model has other weights than
    the adapter was trained on.
    """
    named_base = adapters.named_base(folder)
    reasons = []  # why each name leads to no model
    for name in named_base.names:
        try:
            location = _named_folder(home, name)
            base = _base_model(name, location.kind, location.ref, location.folder)
        except UserError as error:
            reasons.append(f"{name}: {error.message}")
            continue
        adapters.require_same_weights(home, folder, named_base, base.base_path)
        return replace(_with_adapter(base, folder), ref=ref, kind="adapter")
    raise _no_base(folder, named_base.names, "; ".join(reasons))


def _no_base(folder: Path, names: Sequence[str], reasons: str) -> UserError:
    """Return the error for the adapter in `folder`, whose base model is not here.

    Args:
        names: the names that the adapter gives its base model; may be empty.
        reasons: one text that says for each name why it leads to no model; "" without names.
    """
    hint = "Put the base where adapter_config.json names it (base_model_name_or_path)."
    known_name = next((name for name in names if name in KNOWN), "")
    if known_name:
        hint = f"Fetch it once: `honesmith models add {known_name}`."
    return _not_found(f"the base model of {folder} is not here: {reasons or 'it names none'}", hint)


def _run_config(run: RunDir) -> RunConfig:
    """Read the config of a run of any kind. Raises UserError MODEL_NOT_FOUND if it cannot be
    read."""
    try:
        return run.read_config()
    except (OSError, DamagedRecord) as error:
        raise _not_found(f"the run {run.id} cannot be read: {error}", "Use another run.") from error


def _base_of(config: TrainConfig, run: RunDir) -> tuple[str, Path]:
    """Return a run's base model: its reference and its folder. Raises UserError MODEL_NOT_FOUND if
    the folder is gone."""
    base = config.base
    # A built-in model is read from this installation: the recorded path may be in an older one.
    path = BUILTIN.get(base.ref) or Path(base.path)
    if not (path / "config.json").is_file():
        raise _not_found(
            f"the base model of {run.id}, {base.ref}, is no longer at {path}",
            "Put the model back at that path.",
        )
    return base.ref, path


def _no_checkpoint(run: RunDir, checkpoint_name: str) -> UserError:
    """Return the error for a run that lacks a checkpoint, with a hint what to do instead.

    `checkpoint_name` is the one asked for: "best", "stepN", or "" for the newest (a run that lacks
    the newest has none at all).
    """
    steps = run.checkpoint_steps()
    if run.deleted.exists():
        return _not_found(
            f"the files of {run.id} were deleted, its checkpoints too",
            "Name another run or a base model.",
        )
    if not steps:
        return _not_found(
            f"{run.id} has no complete checkpoint yet",
            Hint(
                "Wait for one; a run that ended without one starts again when it is resumed.",
                Call("wait_run", {"run_id": run.id}),
            ),
        )
    references = ", ".join(f"{run.id}@step{step}" for step in steps[-_NAMED_STEPS:])
    return _not_found(f"{run.id} has no checkpoint {checkpoint_name}", f"It has {references}.")


def _local_folder(ref: str) -> Path | None:
    """Return the folder that `ref` names, with links resolved, or None if it may be a hub id.

    A name without a slash is no path (None). A path that begins with /, ./, ../ or ~ must exist. A
    bare A/B may be a hub id: None if there is no such folder. Raises UserError MODEL_NOT_FOUND for
    a file, or if a path that must exist does not.
    """
    is_explicit_path = ref.startswith(("/", "./", "../", "~")) or ref in (".", "..")
    if not is_explicit_path and "/" not in ref:
        return None
    path = Path(ref).expanduser().absolute()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise _not_found(f"{path} is a file", "Name the folder that holds config.json.")
    if is_explicit_path:
        raise _not_found(f"{path} does not exist", "Name a folder that holds config.json.")
    return None


def _gguf_file(ref: str) -> Path:
    """Return the GGUF file at the path `ref`, with links resolved. Raises UserError MODEL_NOT_FOUND
    if there is no such file."""
    path = Path(ref).expanduser().absolute()
    if not path.is_file():
        raise _not_found(f"{path} does not exist", "Name a GGUF file or a model folder.")
    return path.resolve()


def _unknown_reference(home: Home, ref: str) -> UserError:
    """Return the error for a reference that names no model, with the most similar names as a
    hint."""
    known_names = [
        *BUILTIN,
        *library.names(home),
        *(run.id for run in _runs_with_checkpoints(home)),
        *hub.cached_ids(home),
    ]
    return _not_found(f"no model is named {ref!r}", _hint_for_unknown(ref, known_names))


def _hint_for_unknown(ref: str, known_names: list[str]) -> str:
    """Suggest what to write in place of `ref`, which names no model. `known_names` are the names of
    models and the run ids that exist."""
    name = ref.partition("@")[0]
    if "@" in ref and name in known_names:  # the run exists, what follows the @ is wrong
        return f"After a run id stands @best or @stepN, as in {name}@best."
    if name in KNOWN:
        return f"Fetch it once: `honesmith models add {name}` ({KNOWN[name].megabytes} MB)."
    similar = difflib.get_close_matches(name, known_names, n=3, cutoff=0.5)
    if similar:
        return f"Did you mean {' or '.join(similar)}?"
    return "Give `pebble`, a folder (/path/to/model), a hub id (ORG/NAME) or a run id."


def _not_found(message: str, hint: str | Hint) -> UserError:
    """Return the error MODEL_NOT_FOUND for the argument `model`."""
    return UserError("MODEL_NOT_FOUND", message, hint=hint, field="model")


def _runs_with_checkpoints(home: Home) -> list[RunDir]:
    """Return the runs with a complete checkpoint, the most recently changed folder first.

    A run that ended without a checkpoint gets none later unless it is resumed. Such runs are
    remembered in `_ended_without_checkpoint`, so that a listing need not read their folders again.
    """
    versions = _run_versions(home)
    # For a member of a team (`home.viewer`), `versions` has only the runs that the member may see.
    names = [name for name in _run_folders(home) if home.viewer is None or name in versions]
    runs = []
    for name in names:
        version = versions.get(name)  # None for a folder without a row in the database
        # A version includes the run's state and attempt, so a resumed run has another key.
        key = (str(home.root), version)
        if version is not None and key in _ended_without_checkpoint:
            continue
        run = RunDir(home.runs / name)
        if run.checkpoint_steps():
            runs.append(run)
        elif version is not None:
            _run_id, state, *_ = version
            if state in TERMINAL:
                _ended_without_checkpoint.add(key)
    return runs


def _run_versions(home: Home) -> dict[str, tuple[str, str, int, float | None]]:
    """Return, by run id, a tuple for each training run that changes whenever the run does: (run id,
    state, attempt, end time or None). Returns {} if there is no database."""
    if not home.db.is_file():
        return {}
    with Store(home) as store:
        rows = store.run_marks("train")
    return {run_id: (run_id, state, attempt, ended) for run_id, state, attempt, ended in rows}


def _run_folders(home: Home) -> list[str]:
    """Return the names of the runs' folders, the most recently changed first."""
    folders = []
    # A home without any run has no folder of runs (FileNotFoundError).
    with contextlib.suppress(FileNotFoundError), os.scandir(home.runs) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted since the folder was listed
                if entry.is_dir():
                    folders.append((entry.stat().st_mtime, entry.name))
    return [name for _, name in sorted(folders, reverse=True)]


def _usable_base(ref: str, kind: str, path: Path) -> UsableModel | None:
    """Describe the model in the folder `path` for a listing; None if it cannot be trained here.
    `ref` is the reference by which a run names it; `kind` says where it is stored, "home" for the
    home folder."""
    try:
        facts = model_files.read_facts(path)
    except UserError:
        return None
    # Only a model stored in the home has a file that says where it came from.
    origin = model_origin.read(path) if kind == "home" else None
    model = UsableModel(
        ref, kind, params=facts.params, context=facts.max_positions, thinking=facts.thinking
    )
    return replace(model, origin=origin.sentence()) if origin else model


def _usable_run(run: RunDir) -> UsableModel | None:
    """Describe the model of a training run for a listing. Returns None for a run of another kind,
    or if the run's config or base model cannot be read."""
    try:
        config = _run_config(run)
        if not isinstance(config, TrainConfig):
            return None
        base_ref, path = _base_of(config, run)
    except UserError:
        return None
    model = _usable_base(run.id, kind="run", path=path)
    if model is None:
        return None
    best = run.resolve_checkpoint("best")
    checkpoints = run.checkpoint_steps()
    best_name = best.name if best is not None else ""  # "stepN"
    return replace(model, base=base_ref, checkpoints=checkpoints, best=best_name)
