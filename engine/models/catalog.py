"""What a model reference means: the built-in model, a folder, a hub id, or a run's adapter.

One function, `resolve_model`, for every place a model can be named. It reads config.json and
safetensors headers only, so it is quick and needs no torch; whatever cannot be trained here is
refused with the reason before anything is queued.
"""

import contextlib
import difflib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.core.reply import ReplyBase
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.models import hub, model_files
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records.record import DamagedRecord
from engine.records.run_config import RunConfig, TrainConfig
from engine.records.settings import PROJECTIONS

__all__ = ["BUILTIN", "ModelFacts", "ModelRef", "resolve_model", "usable_models"]

BUILTIN: dict[str, Path] = {"pebble": Path(__file__).resolve().parents[1] / "pebble"}

# Runs that ended without a checkpoint, by home and what the store says of them.
_without: set[tuple[object, ...]] = set()
_RUN = re.compile(r"(?P<run>[A-Za-z0-9][\w.-]*)(?:@(?P<which>best|step\d+))?")


@dataclass(frozen=True)
class ModelRef:
    """A model reference and what it stands for.

    Attributes:
        ref: as given.
        kind: "builtin", "path", "hub" or "run".
        base_ref: the reference of the base model ("pebble", a path, a hub id).
        base_path: folder with config.json, weights and tokenizer. Of a hub model the weights may
            be yet to come (`hub.ensure_weights`).
        adapter: checkpoint folder in PEFT format; None for a base model.
        adapter_facts: shape of the adapter, else None.
        run_id: the run behind the adapter, else "".
        facts: sizes of the base.
    """

    ref: str
    kind: str
    base_ref: str
    base_path: Path
    adapter: Path | None
    adapter_facts: AdapterFacts | None
    run_id: str
    facts: ModelFacts


def resolve_model(home: Home, ref: str) -> ModelRef:
    """The model behind `ref`: `pebble`, a path, a hub id, `RUN`, `RUN@best` or `RUN@stepN`.

    A name with a slash is a path when such a folder exists, else a hub id.
    Raises UserError MODEL_NOT_FOUND, MODEL_UNSUPPORTED or ADAPTER_MISMATCH.
    """
    ref = ref.strip()
    if not _can_be_a_path(ref):
        raise _not_found(
            f"{ref[:60]!r}... cannot name a model: it is too long or has a NUL in it",
            "Give `pebble`, a folder (/path/to/model), a hub id (ORG/NAME) or a run id.",
        )
    if ref in BUILTIN:
        return _base(ref, "builtin", ref, BUILTIN[ref])
    run = _run_of(home, ref)
    if run is not None:
        return _from_run(home, ref, *run)
    folder = _local_folder(ref)
    if folder is not None:
        return _base(ref, "path", str(folder), folder)
    if hub.HUB_ID.fullmatch(ref):
        return _base(ref, "hub", ref, hub.look_up(home, ref))
    raise _unknown(home, ref)


def check_in_sight(home: Home, ref: str) -> None:
    """Refuse a path that is no model which can be used, whatever it is, in the same words.

    Asked for those who may not look around on this machine: a refusal that said more would tell
    them which files there are. Raises UserError MODEL_NOT_FOUND.
    """
    ref = ref.strip()
    if not ("/" in ref or ref.startswith((".", "~"))) or not _can_be_a_path(ref):
        return
    is_id = hub.HUB_ID.fullmatch(ref) is not None
    try:
        folder = _local_folder(ref)
        if folder is not None:
            model_files.read_facts(folder)
        seen = folder is not None or is_id
    except (UserError, OSError, ValueError, RuntimeError):  # also what may not be entered
        seen = False
        if is_id:
            hub.look_up(home, ref)  # as if nothing lay there
    if not seen:
        hint = "Name a folder that holds a whole model."
        raise _not_found(f"no model is at {ref!r}", hint)


@dataclass(frozen=True)
class UsableModel(ReplyBase):
    """A model that can be named, as a listing shows it.

    Attributes:
        kind: builtin, hub or run.
        params: parameters of the base; `context` its longest context in tokens.
        thinking: whether its chat template can switch a think block on and off.
        base, checkpoints, best: of a run its base model, the steps of its checkpoints, and the
            folder name of the best one ("" where none is best).
    """

    ref: str
    kind: str
    params: int
    context: int
    thinking: bool
    base: str | None = None
    checkpoints: list[int] | None = None
    best: str | None = None


def usable_models(home: Home) -> list[UsableModel]:
    """Models that work without a download: built in, whole in a local cache, and adapters of
    runs, the newest run first."""
    local = dict(BUILTIN)
    for repo in hub.cached_ids(home):
        folder = hub.cached(home, repo)
        if folder is not None:
            local[repo] = folder
    listed = [
        _usable(ref, "builtin" if ref in BUILTIN else "hub", path) for ref, path in local.items()
    ]
    listed += [_usable_run(run) for run in _trained(home)]
    return [model for model in listed if model is not None]


def _base(ref: str, kind: str, base_ref: str, path: Path) -> ModelRef:
    return ModelRef(ref, kind, base_ref, path, None, None, "", model_files.read_facts(path))


def _run_of(home: Home, ref: str) -> tuple[RunDir, str] | None:
    match = _RUN.fullmatch(ref)
    if match is None:
        return None
    run = home.run(match["run"])
    return (run, match["which"] or "") if run.config.is_file() else None


def _from_run(home: Home, ref: str, run: RunDir, which: str) -> ModelRef:
    """The adapter of a run on its base. Raises UserError as resolve_model does."""
    config = _run_config(run)
    if not isinstance(config, TrainConfig):
        raise _not_found(
            f"{run.id} is no training run, so it left no model",
            "Name the run that was evaluated, or a base model.",
        )
    checkpoint = run.resolve_checkpoint(which)
    if checkpoint is None:
        raise _no_checkpoint(run, which)
    base_ref, base_path = _base_of(config, run)
    adapter = _adapter_facts(checkpoint)
    facts = model_files.read_facts(base_path)
    _check_adapter(checkpoint, adapter, facts)
    return ModelRef(ref, "run", base_ref, base_path, checkpoint, adapter, run.id, facts)


def _run_config(run: RunDir) -> RunConfig:
    try:
        return run.read_config()
    except (OSError, DamagedRecord) as error:
        raise _not_found(f"the run {run.id} cannot be read: {error}", "Use another run.") from error


def _base_of(config: TrainConfig, run: RunDir) -> tuple[str, Path]:
    """The base of a run; a built-in one is where this installation has it."""
    base = config.base
    path = BUILTIN.get(base.ref) or Path(base.path)
    if not (path / "config.json").is_file():
        raise _not_found(
            f"the base model of {run.id}, {base.ref}, is no longer at {path}",
            "Put the model back at that path.",
        )
    return base.ref, path


def _no_checkpoint(run: RunDir, which: str) -> UserError:
    """The error for a run without the checkpoint that is asked for."""
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
    named = ", ".join(f"{run.id}@step{step}" for step in steps[-6:])
    return _not_found(f"{run.id} has no checkpoint {which}", f"It has {named}.")


def _adapter_facts(checkpoint: Path) -> AdapterFacts:
    """The shape in a checkpoint's adapter_config.json (PEFT's format)."""
    config = model_files.load_json(checkpoint / "adapter_config.json")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not targets:
        raise _mismatch(f"{checkpoint} is no LoRA adapter in PEFT's format")
    names = [targets] if isinstance(targets, str) else [str(name) for name in targets]
    known = [name for name in PROJECTIONS if name in names]
    if "all-linear" in names:
        known = list(PROJECTIONS)
    if not known:
        raise _mismatch(f"{checkpoint} adapts {', '.join(names)}, which are not trained here")
    return AdapterFacts(rank, int(alpha), tuple(known))


def _check_adapter(checkpoint: Path, adapter: AdapterFacts, facts: ModelFacts) -> None:
    """The adapter's matrices must fit the base's projections, layer for layer."""
    weights = checkpoint / "adapter_model.safetensors"
    if not weights.is_file():
        raise _mismatch(f"{checkpoint} has no adapter_model.safetensors")
    tensors = model_files.read_header(weights)
    for name in adapter.targets:
        inputs, outputs = facts.projection(name)
        shapes = {"lora_A": (adapter.rank, inputs), "lora_B": (outputs, adapter.rank)}
        for part, shape in shapes.items():
            matrices = [t.shape for key, t in tensors.items() if f".{name}.{part}." in key]
            if len(matrices) != facts.layers or any(size != shape for size in matrices):
                raise _mismatch(
                    f"{checkpoint} does not fit its base: {facts.layers} {name}.{part} of "
                    f"{list(shape)} expected, {len(matrices)} there"
                    + (f", the first {list(matrices[0])}" if matrices else "")
                )


def _mismatch(message: str) -> UserError:
    return UserError(
        "ADAPTER_MISMATCH", message, hint="Start from the base model instead.", field="model"
    )


def _can_be_a_path(ref: str) -> bool:
    """Whether the operating system can be asked about `ref`; it raises for what cannot be."""
    parts = ref.encode("utf-8", "surrogatepass")
    return b"\0" not in parts and len(parts) < 4096 and max(map(len, parts.split(b"/"))) < 250


def _local_folder(ref: str) -> Path | None:
    """The folder `ref` names; explicit paths must exist, a bare A/B may also be a hub id."""
    explicit = ref.startswith(("/", "./", "../", "~")) or ref in (".", "..")
    if not explicit and "/" not in ref:
        return None
    path = Path(ref).expanduser().absolute()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise _not_found(f"{path} is a file", "Name the folder that holds config.json.")
    if explicit:
        raise _not_found(f"{path} does not exist", "Name a folder that holds config.json.")
    return None


def _unknown(home: Home, ref: str) -> UserError:
    """The error for a reference that means nothing, with what was probably meant."""
    name = ref.partition("@")[0]
    known = [*BUILTIN, *(run.id for run in _trained(home)), *hub.cached_ids(home)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if "@" in ref and name in known:
        hint = f"After a run id stands @best or @stepN, as in {name}@best."
    elif near:
        hint = f"Did you mean {' or '.join(near)}?"
    else:
        hint = "Give `pebble`, a folder (/path/to/model), a hub id (ORG/NAME) or a run id."
    return _not_found(f"no model is named {ref!r}", hint)


def _not_found(message: str, hint: str | Hint) -> UserError:
    return UserError("MODEL_NOT_FOUND", message, hint=hint, field="model")


def _trained(home: Home) -> list[RunDir]:
    """Runs with a complete checkpoint, newest folder first.

    Runs that ended without one are remembered by this process: nothing is added to them later.
    """
    folders = []
    with contextlib.suppress(FileNotFoundError), os.scandir(home.runs) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_dir():
                    folders.append((entry.stat().st_mtime, entry.name))
    marks = {}
    if home.db.is_file():
        with Store(home) as store:
            marks = {mark[0]: mark for mark in store.run_marks("train")}
    runs = []
    for _, name in sorted(folders, reverse=True):
        mark = marks.get(name)
        key = (str(home.root), mark)
        if mark is not None and key in _without:
            continue
        run = RunDir(home.runs / name)
        if run.checkpoint_steps():
            runs.append(run)
        elif mark is not None and mark[1] in TERMINAL:
            _without.add(key)
    return runs


def _usable(ref: str, kind: str, path: Path) -> UsableModel | None:
    """The model in `path`; None where it cannot be trained here."""
    try:
        facts = model_files.read_facts(path)
    except UserError:
        return None
    return UsableModel(ref, kind, facts.params, facts.max_positions, facts.thinking)


def _usable_run(run: RunDir) -> UsableModel | None:
    """The model that a training run left; None where its base or its config cannot be read."""
    try:
        config = _run_config(run)
        if not isinstance(config, TrainConfig):
            return None
        base_ref, path = _base_of(config, run)
    except UserError:
        return None
    model = _usable(run.id, "run", path)
    if model is None:
        return None
    best = run.resolve_checkpoint("best")
    checkpoints, best_name = run.checkpoint_steps(), best.name if best is not None else ""
    return replace(model, base=base_ref, checkpoints=checkpoints, best=best_name)
