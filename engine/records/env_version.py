"""Facts about a stored environment version, which the push wrote (`env.json`), and its seal if the
owner made it a sealed exam (`seal.json`)."""

from pydantic import Field

from engine.core.files import JsonObject
from engine.records.data_index import IndexedFile
from engine.records.record import Record
from envs.config.settings import Limits
from envs.json_types import ToolSchema


class PushProblem(Record):
    """Something in the environment's folder that its author should look at."""

    message: str


class EnvVersion(Record):
    """One version of an environment. A field with a default is missing in files of older releases.

    Attributes:
        env_id: `name@hash`.
        hash: the beginning of `digest`, which is the SHA-256 of the version's files.
        kind: single (one turn), multi (several turns), command (a program plays the tasks), sft
            (answers to imitate) or preference (chosen and rejected answers).
        scored: whether the environment can score a completion.
        scorer: how answers to the rows of data files are scored (envs/scored_rows.py); "" if they
            are not scored, or if the environment's own code scores them.
        tools: the tools that the model may call.
        params: the arguments of `load_environment`, from environment.toml.
        rows: split (train, heldout, and perhaps dev) -> number of task rows.
        split: how the split was decided, in words.
        prompt_of: the version that asks the same tasks in other words of [prompt] in
            environment.toml; "" if none is known.
        contamination: which training rows and held-out tasks overlap
            (engine/evidence/overlap/overlap.py); empty if they were not compared.
        data: large data files that are part of the version but are not copied, with the number of
            training rows in each; empty if all rows are stored.
        distinct_prompts: number of different prompts of the training rows in `data`.
        files, size: number of stored files, and their bytes.
        left_out: files of the pushed folder that are not part of the version.
        limits: what the environment's process may use.
        secrets: names of the secrets that the environment reads.
        python: the interpreter that has the environment's packages; "" for any.
        isolation: how the environment's code was confined at the push, in words.
    """

    env_id: str = ""
    name: str = ""
    hash: str = ""
    digest: str = ""
    kind: str
    scored: bool
    scorer: str = ""
    tools: list[ToolSchema]
    params: JsonObject = Field(default_factory=dict)
    rows: dict[str, int]
    split: str = ""
    prompt_of: str = ""
    contamination: JsonObject = Field(default_factory=dict)
    data: tuple[IndexedFile, ...] = ()
    distinct_prompts: int = 0
    files: int = 0
    size: int = 0
    left_out: tuple[str, ...] = ()
    limits: Limits
    secrets: tuple[str, ...]
    python: str = ""
    isolation: str = ""
    warnings: tuple[str, ...] = ()
    problems: tuple[PushProblem, ...] = ()


SEAL = "seal.json"  # the name of the file of a seal in the version's folder


class Seal(Record):
    """The seal of an environment version that is an exam: nobody may see its tasks.

    Attributes:
        looks: how many models may be asked the tasks; a model counts once for each evaluation.
        sealed: when the version was sealed, in seconds since the epoch.
    """

    looks: int = Field(ge=1)
    sealed: float
