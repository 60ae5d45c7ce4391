"""What is known of a stored environment version: what push learnt of it, written once (`env.json`);
and its seal, where its owner made it a sealed exam (`seal.json`)."""

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
    """One version of an environment. Defaults stand for what older releases did not write.

    Attributes:
        env_id: `name@hash`; `hash` is the beginning of `digest`, the SHA-256 of its files.
        kind: single, multi, command (a program plays the tasks), sft (answers to imitate) or
            preference (chosen and rejected ones).
        scored: whether it can score a completion.
        scorer: how rows of data files are scored by their answers (envs/scored_rows.py); "" where
            they are not, or where the environment's own code scores.
        tools: what its model may call.
        params: the arguments of `load_environment`, from environment.toml.
        rows: split (train, dev where there is one, heldout) -> number of task rows.
        split: where the split came from, in words.
        contamination: what training rows share with held-out tasks
            (engine/evidence/overlap/overlap.py); empty where they were not compared.
        data: files that are part of the version and stay where they are, with the number of
            training rows in each; empty where all rows are stored.
        distinct_prompts: of the training rows in `data`.
        files, size: number of stored files, and their bytes.
        left_out: files of the pushed folder that are not part of the version.
        limits: what its process may use.
        secrets: names of the secrets it reads.
        python: the interpreter that has its packages, "" for any.
        isolation: what confined its code at push, in words.
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


SEAL = "seal.json"  # in the version's folder


class Seal(Record):
    """The seal of an exam, of which nobody is shown a task.

    Attributes:
        looks: how many models may be asked its tasks, each evaluation of a model counted.
        sealed: when it was sealed, seconds since the epoch.
    """

    looks: int = Field(ge=1)
    sealed: float
