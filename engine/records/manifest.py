"""`manifest.json` of a run: environment, model, versions, machine; written once before step 1."""

from pathlib import Path

from pydantic import Field

from engine.core.wording.kinds import Kind
from engine.records.record import Record


class EnvironmentUsed(Record):
    """The environment version that was used, and the SHA-256 of its task rows."""

    env_id: str
    tasks_sha256: str


class OtherWeights(Record):
    """A model that looks like the base of a run and has other weights.

    Attributes:
        ref: its reference.
        weights: the SHA-256 that stands for its weights (engine/home/hashes.py).
        run_id: the earlier run whose base it was, under the very name that the base has now; "" for
            a model of this machine with the base's configuration and vocabulary.
    """

    ref: str
    weights: str
    run_id: str = ""


class ModelUsed(Record):
    """The base model that was used.

    Attributes:
        ref: its reference.
        files: name of a file of the model -> SHA-256.
        start_adapter: name of a file -> SHA-256, for the adapter that the run continues from; None
            for a new adapter.
        others: models for which the base may be taken, by its name or its looks.
    """

    ref: str
    files: dict[str, str]
    start_adapter: dict[str, str] | None
    others: list[OtherWeights] = Field(default_factory=list)


class MachineUsed(Record):
    """The machine on which the run was carried out; `ram` is in bytes."""

    device: str
    threads: int
    machine: str
    cores: int
    ram: int


class Choice(Record):
    """Which of two implementations was used.

    Attributes:
        kind: its name.
        why: why the faster implementation was not used; "" if it was.
    """

    kind: str
    why: str


class SamplingUsed(Record):
    """How a run's own evaluations are sampled; `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float
    top_p: float
    stop: list[str]
    seed: int


class JudgeUsed(Record):
    """A model that the environment may ask for grades.

    Attributes:
        ref: its name, such as "model:pebble" or "openai:big".
        identity: the hash by which judges are told apart (envs/judge.py).
        served_as: the model's name where it answers; of a run's model it names the checkpoint.
        weights: of a model of the home, the SHA-256 that stands for the weights of its base; ""
            for a model behind a URL, which nothing here can vouch for.
        adapter: of such a model, the SHA-256 of its adapter; "" for none.
    """

    ref: str
    identity: str
    served_as: str
    weights: str = ""
    adapter: str = ""


class ReplayUsed(Record):
    """The rows that were replayed: trained on beside the run's own rows, to keep earlier skills.

    Attributes:
        share: their share of each batch, which is the setting `keep`.
        source: the battery (set of questions) that the start model was asked, or the id of the
            environment that has the rows.
        rows: how many different rows there are.
        questions: how many questions the start model was asked; None if the rows are reference
            answers of an environment.
        opposed: how many rows were left out because they answer a prompt of the run's own rows
            otherwise.
        beside: the rows of `keep_env`, if these are replayed in addition to those of a battery;
            otherwise None.
    """

    share: float
    source: str
    rows: int
    questions: int | None = None
    opposed: int = 0
    beside: "ReplayUsed | None" = None

    @property
    def nothing(self) -> str:
        """The reason why there are no rows to replay, as a text; only asked if `rows` is 0."""
        if self.opposed:
            return f"no row of {self.source} is left{self._without_opposed}"
        if self.questions is None:  # the rows would be reference answers of an environment
            return f"{self.source} has no train row with an answer that no exam asks"
        return (
            f"the starting model answers none of {self.questions} questions of {self.source} "
            "rightly"
        )

    @property
    def meaning(self) -> str:
        """The kind of the replayed rows in words, such as "train rows of sums@1f0a"."""
        if self.questions is None:  # the rows are reference answers of an environment
            return f"train rows of {self.source}"
        # The id of an environment version has an "@", the name of a battery has none.
        kind = "train tasks" if "@" in self.source else "practice questions"
        return f"the starting model's right answers to {self.questions} {kind} of {self.source}"

    @property
    def sentence(self) -> str:
        """A sentence that says what was replayed, such as "keep = 0.2 replayed 186 rows: ..."."""
        others = ""
        if self.beside:  # the rows of a second source
            others = (
                f"; and {self.beside.rows}: {self.beside.meaning}{self.beside._without_opposed}"
            )
        return (
            f"keep = {self.share:g} replayed {self.rows} rows: {self.meaning}"
            f"{self._without_opposed}{others}."
        )

    @property
    def _without_opposed(self) -> str:
        """A clause that says how many rows were left out because they answer a prompt of the run's
        own rows otherwise; "" for none."""
        if not self.opposed:
            return ""
        return f" ({self.opposed} left out that contradict the task's own rows)"


class Manifest(Record):
    """Everything that is needed to say later what a run's numbers rest on.

    Attributes:
        time: when the manifest was written, in seconds since the epoch.
        settings_sha256: the hash of the resolved settings as sorted JSON.
        reward_risk_accepted: whether the run was trained although the environment's reward audit
            fails.
        versions: versions of Python and of the packages that affect the numbers.
        matrix_flops: operations per second of a large matrix product on the machine.
        precision: number format of the frozen weights.
        forward: whether the forward pass was `own` or that of transformers.
        kernels: which fused functions were used.
        isolation: how the environment's process is confined; "" if no such process runs.
        replayed: the rows that `keep` replayed; None if it is 0.
        shared_texts: which texts are the same in all training rows: "tools", "system".
        judges: the models that the environment may ask by name.
        switched_off: optional faster kernel (engine/machine/fast_paths) -> why it does not work on
            the device.
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
    judges: list[JudgeUsed] = Field(default_factory=list)


class BasesAsked(Record):
    """`bases.json` of an evaluation: the weights that its models had, and who could grade them.

    Attributes:
        weights: folder of a base model -> name of each weight file -> its SHA-256.
        judges: the models that the environment may ask; missing in older files.
    """

    weights: dict[str, dict[str, str]]
    judges: list[JudgeUsed] = Field(default_factory=list)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in the file at `path`.

    Raises FileNotFoundError if there is no file. Raises DamagedRecord, which names the file and the
    first wrong key, if the file does not hold a manifest.
    """
    return Manifest.read(path)
