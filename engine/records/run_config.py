"""`config.json` of a run: everything that submit resolved; written once, before the run exists."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from engine.core.files import JsonObject, open_file
from engine.core.format import host_of
from engine.core.wording.kinds import Kind
from engine.records.estimate import Estimate
from engine.records.record import DamagedRecord, Record, fault_of
from engine.records.settings import (
    DistillSettings,
    DPOSettings,
    EvaluationSettings,
    GRPOSettings,
    PromptSettings,
    SFTSettings,
)

# A split of an environment's tasks.
SplitName = Literal["heldout", "dev", "train"]


class BaseModelRef(Record):
    """The base model of a run: its reference, and the folder with its files."""

    ref: str
    path: str


class EndpointEntry(Record):
    """A model behind a URL, as config.toml named it at the submit (engine/home/user_config.py).

    Attributes:
        name: the endpoint's name in config.toml.
        url: the address of the server, up to and including `/v1`.
        model: the model's name on that server.
        key_env: the environment variable that holds the key; "" if no key is needed.
        price_in, price_out: money per million tokens of prompts and of answers; None if not known.
        max_concurrency: the most requests under way at once.
        timeout_s: seconds after which one request is given up.
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
        """Write the model and its host, such as "big at api.example.com"."""
        return f"{self.model} at {host_of(self.url)}"


class ModelEntry(Record):
    """A model that an evaluation or a probe asks.

    Attributes:
        ref: the reference by which the model was named.
        base_path: folder of the base model; "" for a model behind a URL.
        adapter: folder of the adapter inside the run's folder; None for a base model.
        endpoint: the server of a model behind a URL; None for a model that is loaded here.
    """

    ref: str
    base_path: str
    adapter: str | None = None
    endpoint: EndpointEntry | None = None


class LocalTeacher(Record):
    """A teacher that is loaded beside the policy; `adapter` is a folder inside the run's folder."""

    kind: Literal["local"] = "local"
    ref: str
    base_path: str
    adapter: str | None = None


class EndpointTeacher(Record):
    """A teacher behind an OpenAI-compatible server.

    Attributes:
        url: the address of the server, up to and including `/v1`.
        model: the model's name on that server.
        key_env: the environment variable that holds the key; "" if no key is needed.
    """

    kind: Literal["endpoint"] = "endpoint"
    url: str
    model: str
    key_env: str = ""


Teacher = Annotated[LocalTeacher | EndpointTeacher, Field(discriminator="kind")]


class StoredRows(Record):
    """Stored answers of one model that a regrade (a new scoring) scores.

    Attributes:
        ref: the model.
        rows: the file with the answers, relative to the folder of the run that stored them.
    """

    ref: str
    rows: str


class AwaitedAdapter(Record):
    """An adapter that another run has yet to train when this run is submitted.

    Attributes:
        run_id: the run that trains the adapter.
        checkpoint: which checkpoint of that run: "best", "stepN", or "" for the newest.
        folder: the folder for the adapter inside this run's folder; it is filled when the other run
            is done.
    """

    run_id: str
    checkpoint: str
    folder: str


class PlanPlace(Record):
    """The place of a run in a plan (several runs that were submitted together).

    Attributes:
        plan_id: the id of the plan.
        step: the run's step in the plan, from 1.
        label: the run's values of the varied settings, such as "seed=2"; "" if nothing varies.
        always: whether the step is trained even if the step before it reached the target.
    """

    plan_id: str
    step: int
    label: str = ""
    always: bool = False


class RunConfigBase(Record):
    """The fields that the configs of all kinds of runs have.

    Attributes:
        env_dir: folder of the environment version.
        sources: setting -> source of its value: user, recipe, model, hardware or parent run.
        max_gpu_hours: the cap on device hours; None if there is none.
        wall_limit_hours: an attempt ends if it writes no answer for this many hours; None for a
            training run, which has no such limit.
        waits_for: the adapters that did not exist yet at the submit.
        plan: the run's place in a plan; None if it belongs to no plan.
        owner: the id of the key whose run it is; "" for the local user.
        project: the project of that key at the submit; "" for none.
        priority: its place in the queue: low, normal or high.
    """

    run_id: str
    env_id: str
    env_dir: str
    sources: dict[str, str]
    max_gpu_hours: float | None = None
    wall_limit_hours: float | None = None
    waits_for: list[AwaitedAdapter] = Field(default_factory=list)
    plan: PlanPlace | None = None
    owner: str = ""
    project: str = ""
    priority: str = "normal"

    @property
    def awaited_ids(self) -> list[str]:
        """The ids of the runs whose models did not exist yet at the submit, each once."""
        return list(dict.fromkeys(adapter.run_id for adapter in self.waits_for))

    @property
    def model_refs(self) -> list[str]:
        """The references of the models that the run starts from or asks."""
        return []

    @property
    def needs_device(self) -> bool:
        """Whether the run gets a device. A run that asks only models behind a URL gets none."""
        return True

    @property
    def peak_memory(self) -> int | None:
        """The most bytes that the run is expected to need on its device; None if there is no
        estimate."""
        return None

    @property
    def least_memory(self) -> int:
        """The least bytes of its device with which the run can be carried out; 0 if not known."""
        return 0

    @property
    def planned_memory(self) -> int:
        """The bytes of a device that the run was planned to have; 0 for all of it."""
        return 0


class _TrainConfig(RunConfigBase):
    """The config of a training run.

    Attributes:
        model: the reference of the model that is trained.
        base: the base model of `model`.
        start_adapter: folder of the adapter that the run continues from; "" or None for a new one.
        note: the user's reason for the run.
        expect: the user's prediction of the verdict, or a target; "" for none.
        parent: the id of the run to compare with; "" for none.
        estimate: the time, memory and disk that were expected at the submit.
        device: the device for which the run was planned.
        profile: whether the worker writes a profiler trace of two steps.
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
        """A list with the reference of the model that is trained."""
        return [self.model]

    @property
    def peak_memory(self) -> int | None:
        """The most bytes that the run is expected to need on its device."""
        return self.estimate.peak_memory.total

    @property
    def least_memory(self) -> int:
        """The least bytes of its device with which the run can be carried out; 0 if not known."""
        return self.estimate.least_memory

    @property
    def planned_memory(self) -> int:
        """The bytes of its device that the run was planned to have."""
        return self.estimate.memory_available


class SFTConfig(_TrainConfig):
    """The config of a run of supervised fine-tuning."""

    algorithm: Literal["sft"]
    settings: SFTSettings


class DPOConfig(_TrainConfig):
    """The config of a run of direct preference optimisation."""

    algorithm: Literal["dpo"]
    settings: DPOSettings


class GRPOConfig(_TrainConfig):
    """The config of a run of GRPO."""

    algorithm: Literal["grpo"]
    settings: GRPOSettings


class DistillConfig(_TrainConfig):
    """The config of a run of on-policy distillation.

    `teacher` describes the model that the setting `teacher` names.
    """

    algorithm: Literal["distill"]
    settings: DistillSettings
    teacher: Teacher


class EvaluateConfig(RunConfigBase):
    """The config of an evaluation of up to eight models on the same tasks.

    Attributes:
        rows: the most tasks that are asked.
        attempts: answers per task.
        task_indices: the positions of the tasks in their split; [] to take `rows` tasks in the
            order of evaluations (engine/runs/evaluation/exam.py).
        perturb: the kinds of other words in which the same tasks are also asked; [] for none.
        missing_models: the models that are left out because the runs of a plan that were to train
            them did not get done.
        estimated_hours: an upper estimate of the device hours; 0 in older files.
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
        """The references of the models that are asked."""
        return [model.ref for model in self.models]

    @property
    def endpoints(self) -> dict[str, EndpointEntry]:
        """Reference -> server, for the models behind a URL."""
        return {model.ref: model.endpoint for model in self.models if model.endpoint}

    @property
    def needs_device(self) -> bool:
        """Whether a model is loaded here: not all of them are behind a URL."""
        return len(self.endpoints) < len(self.models)


class PromptConfig(RunConfigBase):
    """A search for a better prompt, which trains no weights.

    Attributes:
        models: the one model that is asked.
        reflection: the model behind a URL that reads its answers and writes prompts.
        estimated_hours: the device hours that it is likely to take.
    """

    kind: Literal["train"]
    algorithm: Literal["prompt"]
    models: list[ModelEntry] = Field(min_length=1, max_length=1)
    reflection: EndpointEntry
    settings: PromptSettings
    note: str = ""
    expect: str = ""
    parent: str = ""
    estimated_hours: float = 0.0

    @property
    def model(self) -> str:
        """The reference of the model that is asked."""
        return self.models[0].ref

    @property
    def model_refs(self) -> list[str]:
        """A list with the reference of the model that is asked."""
        return [self.model]

    @property
    def endpoints(self) -> dict[str, EndpointEntry]:
        """Reference -> server: the model that writes prompts, and the model that is asked if it is
        behind a URL too."""
        endpoints = {self.settings.reflection: self.reflection}
        asked_endpoint = self.models[0].endpoint
        if asked_endpoint is not None:
            endpoints[self.model] = asked_endpoint
        return endpoints

    @property
    def needs_device(self) -> bool:
        """Whether the model that is asked is loaded here, and not behind a URL."""
        return self.models[0].endpoint is None


class RegradeConfig(RunConfigBase):
    """The config of a regrade: another environment version scores stored answers of a run.

    Attributes:
        models: the models that gave the answers, with the files of the answers.
        rows: the most tasks whose answers are scored.
        attempts: answers per task.
        settings: how the answers were sampled, as far as their run says.
        regrade: the id of the run that stored the answers.
        regraded_from: the environment version that scored the answers first.
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
        """The references of the models that gave the answers."""
        return [model.ref for model in self.models]


class ProbeConfig(RunConfigBase):
    """The config of a probe: a short run that samples a model before training.

    Attributes:
        models: a list with the one model that is sampled.
        samples: how many tasks are asked, `settings.group_size` times each.
    """

    kind: Literal["probe"]
    algorithm: Literal["probe"]
    models: list[ModelEntry]
    samples: int
    settings: GRPOSettings

    @property
    def model_refs(self) -> list[str]:
        """A list with the reference of the model that is sampled."""
        return [model.ref for model in self.models]


TrainConfig = SFTConfig | DPOConfig | GRPOConfig | DistillConfig
AskingConfig = EvaluateConfig | RegradeConfig | ProbeConfig
LearningConfig = TrainConfig | PromptConfig  # runs that are held against their own start
RunConfig = LearningConfig | AskingConfig

_ANY_CONFIG: TypeAdapter[RunConfig] = TypeAdapter(
    Annotated[RunConfig, Field(discriminator="algorithm")]
)


def find_run_config(path: Path) -> RunConfig | None:
    """Read the config in the file at `path`; return None if the file is missing or damaged.

    For callers that must work without it, such as a list of runs or a verdict.
    """
    try:
        return read_run_config(path)
    except (OSError, ValueError):  # ValueError: it is damaged, or `path` has a NUL character
        return None


def read_run_config(path: Path) -> RunConfig:
    """Read the config in the file at `path`. The key `algorithm` decides its class.

    Raises FileNotFoundError if there is no file. Raises DamagedRecord, which names the file and the
    first wrong key, if the file does not hold a config.
    """
    with open_file(path) as file:
        content = file.read()
    try:
        return _ANY_CONFIG.validate_json(content)
    except ValidationError as error:
        raise DamagedRecord(str(path), fault_of(error)) from error


def as_run_config(content: Mapping[str, Any]) -> RunConfig:
    """Check the JSON object of a config.json that submit is about to write, and return it typed.

    The key `algorithm` decides its class. Raises ValidationError if a key is missing or wrong.
    """
    return _ANY_CONFIG.validate_python(content)
