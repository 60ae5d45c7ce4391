"""Reads LoRA adapters in PEFT's format: their shape, the base model they were made for, and whether
they fit it.

An adapter comes from a run of this home, from a folder (such as an export of ours) or from the hub.
An exported adapter has a file honesmith.json that says which weights its base model had.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, read_object
from engine.home.hashes import file_hashes, then_and_now, weight_hashes, weights_among
from engine.home.run_dir import CHECKPOINT_MANIFEST, Home, RunDir
from engine.models import model_files
from engine.models.hub import ADAPTER_FILES
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records.manifest import Manifest
from engine.records.record import DamagedRecord

CONFIG, WEIGHTS = ADAPTER_FILES
ORIGIN = "honesmith.json"  # the file in an export that says where the adapter came from
BASE_WEIGHTS = "base_weights"  # that file's key for the SHA-256 of the base's weight files
# The files beside an adapter that say which weights its base had: of an export, of a checkpoint.
BASE_FILES = (ORIGIN, CHECKPOINT_MANIFEST)
# Options of PEFT that make a LoRA compute something other than scale * B A on whole projections.
NOT_PLAIN = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "fan_in_fan_out",
)


@dataclass(frozen=True)
class NamedBase:
    """What an adapter says of its base model.

    Attributes:
        names: references to the base, to be tried in turn: a name, a hub id or a path.
        weights: SHA-256 of the base's weight files by name; {} if the adapter does not say.
    """

    names: tuple[str, ...]
    weights: dict[str, str]


def is_adapter(folder: Path) -> bool:
    """Tell whether the folder holds an adapter rather than a whole model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_facts(folder: Path, base: ModelFacts) -> AdapterFacts:
    """Read the shape of the adapter in `folder` from its adapter_config.json.

    `base` are the facts of its base model. Raises UserError MODEL_UNSUPPORTED if the file cannot be
    read, and ADAPTER_MISMATCH if the adapter is no plain LoRA or adapts a projection that cannot be
    trained in this base model.
    """
    config = model_files.load_json(folder / CONFIG)
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    targets = config.get("target_modules")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not targets:
        raise mismatch(f"{folder} is no LoRA adapter in PEFT's format")
    _require_plain(config, folder)
    # PEFT writes a single target as a text.
    names = [targets] if isinstance(targets, str) else [str(name) for name in targets]
    return AdapterFacts(rank, int(alpha), _adapted_projections(folder, names, base))


def _adapted_projections(folder: Path, names: list[str], base: ModelFacts) -> tuple[str, ...]:
    """Return the projections of the base model that the adapter in `folder` changes.

    `names` are the targets in its configuration; "all-linear" stands for all projections that can
    be trained here. Raises UserError ADAPTER_MISMATCH if a target cannot be trained here, or no
    target is left.
    """
    if "all-linear" in names:
        projections = list(base.targets)
    else:
        projections = [name for name in base.targets if name in names]
    unknown = sorted(set(names) - set(projections) - {"all-linear"})
    if unknown or not projections:
        raise mismatch(f"{folder} adapts {', '.join(unknown)}, which are not trained here")
    return tuple(projections)


def _require_plain(config: JsonObject, folder: Path) -> None:
    """Raise UserError ADAPTER_MISMATCH if the adapter in `folder` has options that make it anything
    but a plain LoRA scaled by lora_alpha / r. `config` is its adapter_config.json."""
    # With use_rslora the LoRA is scaled by lora_alpha / sqrt(r) instead.
    options = [name for name in (*NOT_PLAIN, "use_rslora") if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA":
        options.append(f"peft_type {config['peft_type']}")
    if config.get("bias", "none") != "none":
        options.append(f"bias {config['bias']}")
    if config["lora_alpha"] != int(config["lora_alpha"]):
        options.append(f"lora_alpha {config['lora_alpha']}, which is no whole number")
    if options:
        raise mismatch(f"{folder} is no plain LoRA: it sets {', '.join(options)}")


def require_fit(folder: Path, adapter: AdapterFacts, facts: ModelFacts) -> None:
    """Raise UserError ADAPTER_MISMATCH unless the matrices of `adapter`, whose files are in
    `folder`, fit the base model with these `facts`.

    Every layer must have both matrices of each adapted projection, in the right shape. Only the
    header of the weights file is read.
    """
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise mismatch(f"{folder} has no {WEIGHTS}")
    tensors = model_files.read_header(weights)
    for matrix, expected in _expected_shapes(adapter, facts).items():
        # A name is such as "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
        stored = [tensor.shape for name, tensor in tensors.items() if f".{matrix}." in name]
        # Layers of one model may differ in size, so compare how often each shape occurs.
        if Counter(stored) != Counter(expected):
            raise _no_fit(folder, matrix, expected, stored)


def _expected_shapes(adapter: AdapterFacts, facts: ModelFacts) -> dict[str, list[tuple[int, int]]]:
    """Return the shapes that each matrix, such as "q_proj.lora_A", must have: one shape for each
    layer of the base model that has the projection."""
    shapes: dict[str, list[tuple[int, int]]] = {}
    for name in adapter.targets:
        sizes = facts.projection_shapes(name)
        shapes[f"{name}.lora_A"] = [(adapter.rank, inputs) for inputs, _ in sizes]
        shapes[f"{name}.lora_B"] = [(outputs, adapter.rank) for _, outputs in sizes]
    return shapes


def _no_fit(
    folder: Path,
    matrix: str,
    expected: Sequence[tuple[int, ...]],
    stored: Sequence[tuple[int, ...]],
) -> UserError:
    """Return the error for an adapter that does not fit its base model.

    Args:
        matrix: the matrix at fault, such as "q_proj.lora_A".
        expected: the shape that the base model demands of it in each layer; at least one.
        stored: the shape it has in each layer of the adapter; may be empty.
    """
    message = (
        f"{folder} does not fit its base: {len(expected)} {matrix} of "
        f"{list(expected[0])} expected, {len(stored)} there"
    )
    if stored:
        message += f", the first {list(stored[0])}"
    return mismatch(message)


def named_base(folder: Path) -> NamedBase:
    """Read what the adapter in `folder` says of its base model: the names it gives the base, and
    the hashes of the base's weight files, which only an export or a checkpoint of ours has.

    Raises UserError MODEL_UNSUPPORTED if adapter_config.json cannot be read.
    """
    origin = read_object(folder / ORIGIN)  # {} if there is no such file
    peft_config = model_files.load_json(folder / CONFIG)
    references = (origin.get("base"), peft_config.get("base_model_name_or_path"))
    names = [name for name in references if isinstance(name, str) and name]
    unique_names = tuple(dict.fromkeys(names))
    return NamedBase(unique_names, weights_under(folder))


def weights_under(folder: Path) -> dict[str, str]:
    """Return the hashes of the base model's weight files that the adapter in `folder` was trained
    on: file name -> SHA-256. They stand in a file beside the adapter, which only an export or a
    checkpoint of this program has; {} without such a file."""
    for name in BASE_FILES:
        hashes = read_object(folder / name).get(BASE_WEIGHTS)  # read_object: {} without the file
        if isinstance(hashes, dict) and hashes:
            return hashes
    return {}


def require_trained_base(run: RunDir, base_path: Path) -> None:
    """Raise UserError ADAPTER_MISMATCH if the model in the folder `base_path` has other weights
    than the run was trained on.

    The run's manifest holds the hashes of those weights. Nothing is checked if it cannot be read,
    as before a run has written it, or if the folder has no weights yet.
    """
    try:
        model = Manifest.read(run.manifest).model
    except (OSError, DamagedRecord):
        return
    trained = weights_among(model.files)
    if not trained or not list(base_path.glob("*.safetensors")):
        return  # not recorded, or a model of the hub whose weights are not downloaded yet
    present = weight_hashes(run.home, base_path)
    if present != trained:
        raise _other_weights(run.id, model.ref, base_path, trained, present)


def require_same_weights(home: Home, folder: Path, named_base: NamedBase, base_path: Path) -> None:
    """Raise UserError ADAPTER_MISMATCH if the model in `base_path` has other weights than the base
    that the adapter in `folder` was trained on. Nothing is checked if the adapter does not give the
    hashes of those weights, or if the weights are still to be downloaded from the hub."""
    if not named_base.weights:
        return
    files = [base_path / Path(name).name for name in named_base.weights]
    present_files = [file for file in files if file.is_file()]
    if not present_files and not list(base_path.glob("*.safetensors")):
        return  # a model of the hub, whose weights are downloaded when the run starts
    present = file_hashes(home, present_files)
    if present != named_base.weights:
        first_name = named_base.names[0]  # how the adapter itself calls its base
        raise _other_weights(str(folder), first_name, base_path, named_base.weights, present)


def _other_weights(
    adapter: str, base: str, base_path: Path, trained: Mapping[str, str], present: Mapping[str, str]
) -> UserError:
    """Return the error for an adapter whose base model has other weights than at its training.

    Args:
        adapter: the folder of the adapter, or the id of the run that made it.
        base: the name of the base model, which lies in the folder `base_path`.
        trained, present: the base's weights then and now: file name -> SHA-256.
    """
    return mismatch(
        f"{adapter} was trained on {base} with other weights than {base_path} has: "
        f"{then_and_now(trained, present)} (SHA-256)",
        hint="Put the base model that it was trained on at that place, or train again on this one.",
    )


def mismatch(message: str, hint: str = "Start from the base model instead.") -> UserError:
    """Return the error for an adapter that cannot be used on its base model."""
    return UserError("ADAPTER_MISMATCH", message, hint=hint, field="model")
