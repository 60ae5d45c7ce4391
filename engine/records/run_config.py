"""`config.json` of a run: what submit resolved, written once before the run exists."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from engine.core.files import JsonObject, open_file
from engine.core.format import host_of
from engine.records.estimate import Estimate
from engine.records.record import DamagedRecord, Record, fault_of
from engine.records.settings import (
    DistillSettings,
    DPOSettings,
    EvaluationSettings,
    GRPOSettings,
    SFTSettings,
)
from engine.wording.kinds import Kind

# A side of an environment's tasks.
SplitName = Literal["heldout", "dev", "train"]


class BaseModelRef(Record):
    """The base model under a run: its reference, and the folder with its files."""

    ref: str
    path: str


class EndpointEntry(Record):
    """A model behind a URL, as config.toml named it at the submit (engine/home/user_config.py).

    Attributes:
        key_env: the variable that holds the key; "" where none is needed.
        price_in, price_out: money per million tokens of prompt and of answer; None: not known.
    """

    name: str
    url: str
    model: str
    key_env: str = ""
    price_in: float | None = None
    price_out: float | None = None
    max_concurrency: int = 4
    timeout_s: float = 120.0

    def __str__(self) -> str:
        return f"{self.model} at {host_of(self.url)}"


class ModelEntry(Record):
    """A model that an evaluation or a probe asks.

    Attributes:
        base_path: folder of the base model; "" for a model behind a URL.
        adapter: a folder in the run's own; None for a base model.
        endpoint: where the model answers; None for one that is loaded here.
    """

    ref: str
    base_path: str
    adapter: str | None = None
    endpoint: EndpointEntry | None = None


class LocalTeacher(Record):
    """A teacher that is loaded beside the policy; `adapter` is a folder in the run's own."""

    kind: Literal["local"] = "local"
    ref: str
    base_path: str
    adapter: str | None = None


class EndpointTeacher(Record):
    """A teacher behind an OpenAI-compatible server.

    Attributes:
        url: up to and including `/v1`.
        model: its name there.
        key_env: the variable that holds the key; "" where none is needed.
    """

    kind: Literal["endpoint"] = "endpoint"
    url: str
    model: str
    key_env: str = ""


Teacher = Annotated[LocalTeacher | EndpointTeacher, Field(discriminator="kind")]


class StoredRows(Record):
    """Answers that a regrade scores again: a file of the run they come from."""

    ref: str
    rows: str


class AwaitedAdapter(Record):
    """An adapter that another run is still to make when this run is submitted.

    Attributes:
        run_id: the run that makes it.
        checkpoint: "best", "stepN", or "" for the newest.
        folder: in this run's own folder; filled when the other run is done.
    """

    run_id: str
    checkpoint: str
    folder: str


class PlanPlace(Record):
    """Which step of which plan a run is.

    Attributes:
        step: 1 for the first.
        label: the values that the plan varies and this run has, such as "seed=2"; "" for none.
    """

    plan_id: str
    step: int
    label: str = ""


class RunConfigBase(Record):
    """What the configs of all kinds of run hold.

    Attributes:
        env_dir: folder of the environment's version.
        sources: for each setting where its value came from: user, recipe, model, hardware or
            parent run.
        max_gpu_hours: cap on device hours; None where none was asked for.
        wall_limit_hours: how long one attempt may go on without writing an answer; a training run
            has no such limit.
        waits_for: the adapters that were not there yet at the submit.
        plan: its place in a plan; None for a run of its own.
    """

    run_id: str
    env_id: str
    env_dir: str
    sources: dict[str, str]
    max_gpu_hours: float | None = None
    wall_limit_hours: float | None = None
    waits_for: list[AwaitedAdapter] = Field(default_factory=list)
    plan: PlanPlace | None = None

    @property
    def awaited_ids(self) -> list[str]:
        """The runs whose models were not there yet at the submit, each once."""
        return list(dict.fromkeys(adapter.run_id for adapter in self.waits_for))

    @property
    def model_refs(self) -> list[str]:
        """The models that the run starts from or asks, as the submit named them."""
        return []

    @property
    def needs_device(self) -> bool:
        """Whether the run is given a device; not where it asks nothing but models behind a URL."""
        return True

    @property
    def peak_memory(self) -> int | None:
        """The most memory that the run is expected to need on its device, in bytes; None for a kind
        of run that has no estimate."""
        return None

    @property
    def least_memory(self) -> int:
        """The bytes without which the run cannot be done on its device; 0 where they are not
        known."""
        return 0

    @property
    def planned_memory(self) -> int:
        """The bytes of a device that the run was planned to have; 0 for all of it."""
        return 0


class _TrainConfig(RunConfigBase):
    """A training run.

    Attributes:
        model: the reference as asked for; `base` is what lies under it.
        start_adapter: folder of the adapter it goes on from, "" or None where it starts fresh.
        estimate: what submit expected of it.
        profile: the worker leaves a trace of two steps.
    """

    kind: Literal["train"]
    model: str
    base: BaseModelRef
    start_adapter: str | None
    note: str
    expect: str
    parent: str
    estimate: Estimate
    device: str
    profile: bool = False

    @property
    def model_refs(self) -> list[str]:
        """The references of the models that the run begins with or asks."""
        return [self.model]

    @property
    def peak_memory(self) -> int | None:
        """The most bytes of device memory that the run is expected to hold."""
        return self.estimate.peak_memory.total

    @property
    def least_memory(self) -> int:
        return self.estimate.least_memory

    @property
    def planned_memory(self) -> int:
        return self.estimate.memory_available


class SFTConfig(_TrainConfig):
    """A run of supervised fine-tuning."""

    algorithm: Literal["sft"]
    settings: SFTSettings


class DPOConfig(_TrainConfig):
    """A run of direct preference optimisation."""

    algorithm: Literal["dpo"]
    settings: DPOSettings


class GRPOConfig(_TrainConfig):
    """A run of GRPO."""

    algorithm: Literal["grpo"]
    settings: GRPOSettings


class DistillConfig(_TrainConfig):
    """A run of on-policy distillation; `teacher` is what its setting of that name stands for."""

    algorithm: Literal["distill"]
    settings: DistillSettings
    teacher: Teacher


class EvaluateConfig(RunConfigBase):
    """An evaluation of up to eight models on the same tasks.

    Attributes:
        task_indices: positions of the tasks in their split; [] for the first `rows` of them in the
            order of evaluations.
        perturb: in which other words the same tasks are asked too; [] for none.
        missing_models: those that were to be asked and are left out, because the runs of a plan
            that were to make them did not get done.
        estimated_hours: the most device hours that it takes, as estimated; 0 in older files.
    """

    kind: Literal["evaluate"]
    algorithm: Literal["evaluate"]
    models: list[ModelEntry]
    split: SplitName
    rows: int
    attempts: int
    settings: EvaluationSettings
    task_indices: list[int] = Field(default_factory=list)
    perturb: list[Kind] = Field(default_factory=list)
    missing_models: list[str] = Field(default_factory=list)
    estimated_hours: float = 0.0

    @property
    def model_refs(self) -> list[str]:
        return [model.ref for model in self.models]

    @property
    def endpoints(self) -> dict[str, EndpointEntry]:
        """The models behind a URL, by their reference."""
        return {model.ref: model.endpoint for model in self.models if model.endpoint}

    @property
    def needs_device(self) -> bool:
        return len(self.endpoints) < len(self.models)


class RegradeConfig(RunConfigBase):
    """Stored answers of the run `regrade` scored again by another version of an environment.

    Attributes:
        regraded_from: the version that scored them first.
        settings: how the answers were sampled, as that run says; not all runs say all of it.
    """

    kind: Literal["evaluate"]
    algorithm: Literal["regrade"]
    models: list[StoredRows]
    split: SplitName
    rows: int
    attempts: int
    settings: JsonObject
    regrade: str
    regraded_from: str

    @property
    def model_refs(self) -> list[str]:
        return [model.ref for model in self.models]


class ProbeConfig(RunConfigBase):
    """A short run that samples a model before training."""

    kind: Literal["probe"]
    algorithm: Literal["probe"]
    models: list[ModelEntry]
    samples: int
    settings: GRPOSettings

    @property
    def model_refs(self) -> list[str]:
        return [model.ref for model in self.models]


TrainConfig = SFTConfig | DPOConfig | GRPOConfig | DistillConfig
AskingConfig = EvaluateConfig | RegradeConfig | ProbeConfig
RunConfig = TrainConfig | AskingConfig

_ANY_CONFIG: TypeAdapter[RunConfig] = TypeAdapter(
    Annotated[RunConfig, Field(discriminator="algorithm")]
)


def find_run_config(path: Path) -> RunConfig | None:
    """Read the config in the file at `path`; None where the file is missing or damaged.

    For callers that must go on without it, such as a list of runs or a verdict.
    """
    try:
        return read_run_config(path)
    except (OSError, ValueError):  # damaged, or a name that no file can have
        return None


def read_run_config(path: Path) -> RunConfig:
    """Read the config in the file at `path`. The key `algorithm` decides which of the config
    classes it becomes.

    Raises FileNotFoundError, and DamagedRecord naming the file and the first key at fault.
    """
    with open_file(path) as file:
        data = file.read()
    try:
        return _ANY_CONFIG.validate_json(data)
    except ValidationError as error:
        raise DamagedRecord(str(path), fault_of(error)) from error


def as_run_config(content: Mapping[str, Any]) -> RunConfig:
    """Check the JSON object of a config that submit is about to write, and return it typed. Raises
    ValidationError where it fits none of the config classes."""
    return _ANY_CONFIG.validate_python(content)
