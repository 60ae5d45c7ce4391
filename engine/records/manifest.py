"""`manifest.json` of a run: what was trained on what, with what; written once before step 1."""

from pathlib import Path

from pydantic import Field

from engine.records.record import Record
from engine.wording.kinds import Kind


class EnvironmentUsed(Record):
    """The version of the environment, and the SHA-256 of its task rows."""

    env_id: str
    tasks_sha256: str


class ModelUsed(Record):
    """The base model: its reference, and the SHA-256 of its files by name.

    Attributes:
        start_adapter: the same of the adapter the run goes on from; None where it starts fresh.
    """

    ref: str
    files: dict[str, str]
    start_adapter: dict[str, str] | None


class MachineUsed(Record):
    """Where it ran; `ram` in bytes."""

    device: str
    threads: int
    machine: str
    cores: int
    ram: int


class Choice(Record):
    """Which of two implementations ran, and why the faster one did not, "" where it did."""

    kind: str
    why: str


class SamplingUsed(Record):
    """How a run's own evaluations are sampled; `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float
    top_p: float
    stop: list[str]
    seed: int


class ReplayUsed(Record):
    """The rows that were replayed beside the run's own.

    Attributes:
        share: of each batch, the setting `keep`.
        source: the battery whose practice questions the starting model was asked, or the id of the
            environment whose train rows they are.
        rows: how many different ones there are.
        questions: how many questions the starting model was asked; None for the reference answers
            of an environment's rows.
        beside: the same of the rows of `keep_env`, where those of a battery are replayed beside
            them; None without both.
    """

    share: float
    source: str
    rows: int
    questions: int | None = None
    beside: "ReplayUsed | None" = None

    @property
    def nothing(self) -> str:
        """Why there are no rows, in words."""
        if self.questions is None:
            return f"{self.source} has no train row with an answer that no exam asks"
        return (
            f"the starting model answers none of {self.questions} questions of {self.source} "
            "rightly"
        )

    @property
    def meaning(self) -> str:
        """What the rows are, in words."""
        if self.questions is None:
            return f"train rows of {self.source}"
        kind = "train tasks" if "@" in self.source else "practice questions"
        return f"the starting model's right answers to {self.questions} {kind} of {self.source}"

    @property
    def sentence(self) -> str:
        """What was replayed, in a sentence, such as "keep = 0.2 replayed 186 rows: ..."."""
        others = f"; and {self.beside.rows}: {self.beside.meaning}" if self.beside else ""
        return f"keep = {self.share:g} replayed {self.rows} rows: {self.meaning}{others}."


class Manifest(Record):
    """Everything needed to say later what a run's numbers rest on.

    Attributes:
        time: when it was written, seconds since the epoch.
        settings_sha256: of the resolved settings as sorted JSON.
        reward_risk_accepted: trained although the environment's reward audit fails.
        versions: of Python and the packages that decide the numbers.
        matrix_flops: operations per second of a large matrix product on the machine.
        precision: number format of the frozen weights.
        forward: `own` or transformers' forward pass.
        kernels: which fused functions.
        isolation: how the environment's process is confined; "" where none runs.
        replayed: what `keep` replayed; None where it is 0.
        shared_texts: which texts all training rows share: "tools", "system".
        switched_off: the fast paths (engine/fast_paths) that do not work on the device, with the
            reason of each.
    """

    run_id: str
    time: float
    env: EnvironmentUsed
    model: ModelUsed
    settings_sha256: str
    seed: int
    parent: str
    note: str
    reward_risk_accepted: bool
    versions: dict[str, str]
    hardware: MachineUsed
    matrix_flops: float
    quantization: str
    precision: str
    forward: Choice
    kernels: Choice
    isolation: str
    eval_sampling: SamplingUsed
    replayed: ReplayUsed | None = None
    shared_texts: list[Kind] = Field(default_factory=list)
    switched_off: dict[str, str] = Field(default_factory=dict)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in the file at `path`.

    Raises FileNotFoundError, and DamagedRecord naming the file and the first key at fault.
    """
    return Manifest.read(path)
