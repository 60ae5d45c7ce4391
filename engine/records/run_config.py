"""`config.json` of a run: what submit resolved, written once before the run exists."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from engine.core.files import open_file
from engine.records.record import DamagedRecord, Record, fault_of
from engine.records.settings import EvaluationSettings, GRPOSettings, SFTSettings


class BaseModelRef(Record):
    """The base model under a run: its reference, and the folder with its files."""

    ref: str
    path: str


class ModelEntry(Record):
    """A model that an evaluation or a probe asks; `adapter` is a folder in the run's own."""

    ref: str
    base_path: str
    adapter: str | None = None


class StoredRows(Record):
    """Answers that a regrade scores again: a file of the run they come from."""

    ref: str
    rows: str


class RunConfigBase(Record):
    """What the configs of all kinds of run hold.

    Attributes:
        env_dir: folder of the environment's version.
        sources: for each setting where its value came from: user, recipe, model, hardware or
            parent run.
        max_gpu_hours: cap on device hours; None where none was asked for.
    """

    run_id: str
    env_id: str
    env_dir: str
    sources: dict[str, str]
    max_gpu_hours: float | None = None


class _TrainConfig(RunConfigBase):
    """A training run.

    Attributes:
        model: the reference as asked for; `base` is what lies under it.
        start_adapter: folder of the adapter it goes on from, "" or None where it starts fresh.
        estimate: what submit expected of it (engine/cost/estimate.py).
        profile: the worker leaves a trace of two steps.
    """

    kind: Literal["train"]
    model: str
    base: BaseModelRef
    start_adapter: str | None
    note: str
    expect: str
    parent: str
    estimate: dict[str, Any]
    device: str
    profile: bool = False


class SFTConfig(_TrainConfig):
    """A run of supervised fine-tuning."""

    algorithm: Literal["sft"]
    settings: SFTSettings


class GRPOConfig(_TrainConfig):
    """A run of GRPO."""

    algorithm: Literal["grpo"]
    settings: GRPOSettings


class EvaluateConfig(RunConfigBase):
    """An evaluation of up to eight models on the same tasks."""

    kind: Literal["evaluate"]
    algorithm: Literal["evaluate"]
    models: list[ModelEntry]
    split: Literal["heldout", "train"]
    rows: int
    attempts: int
    settings: EvaluationSettings
    wall_limit_hours: float


class RegradeConfig(RunConfigBase):
    """Stored answers of the run `regrade` scored again by another version of an environment.

    Attributes:
        regraded_from: the version that scored them first.
        settings: how the answers were sampled, as that run says; not all runs say all of it.
    """

    kind: Literal["evaluate"]
    algorithm: Literal["regrade"]
    models: list[StoredRows]
    split: Literal["heldout", "train"]
    rows: int
    attempts: int
    settings: dict[str, Any]
    regrade: str
    regraded_from: str
    wall_limit_hours: float


class ProbeConfig(RunConfigBase):
    """A short run that samples a model before training."""

    kind: Literal["probe"]
    algorithm: Literal["probe"]
    models: list[ModelEntry]
    samples: int
    settings: GRPOSettings
    wall_limit_hours: float


TrainConfig = SFTConfig | GRPOConfig
RunConfig = SFTConfig | GRPOConfig | EvaluateConfig | RegradeConfig | ProbeConfig

_ANY: TypeAdapter[RunConfig] = TypeAdapter(Annotated[RunConfig, Field(discriminator="algorithm")])


def read_run_config(path: Path) -> RunConfig:
    """The config in the file at `path`.

    Raises FileNotFoundError, and DamagedRecord naming the file and the key that is missing or
    wrong.
    """
    with open_file(path) as file:
        data = file.read()
    try:
        return _ANY.validate_json(data)
    except ValidationError as error:
        raise DamagedRecord(str(path), fault_of(error)) from error
