"""The teacher of a distillation: the model or the endpoint that its settings name.

A model behind a URL is named by the URL, or by its name in config.toml (`openai:NAME`).

The teacher must read the student's token ids as the student does. For a local model this is checked
here, by the files of the tokenizers. For a model behind a URL the trainer checks it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from engine.core.errors import UserError
from engine.endpoints.references import find_endpoint, is_endpoint
from engine.home.run_dir import Home
from engine.models import catalog, tokens
from engine.models.catalog import ModelRef
from engine.records.run_config import EndpointTeacher, LocalTeacher
from engine.records.settings import DistillSettings, GivenSettings, TrainSettings


@dataclass(frozen=True)
class ResolvedTeacher:
    """The teacher that the settings of a distillation name.

    Attributes:
        entry: what config.json stores of the teacher.
        model: the model of a local teacher; None for a teacher behind a URL.
        shares_base: whether the teacher is the student's base model or an adapter on it, so that at
            most an adapter has to be loaded for the teacher.
    """

    entry: LocalTeacher | EndpointTeacher
    model: ModelRef | None = None
    shares_base: bool = False


def is_url(name: str) -> bool:
    """Return whether the value of the setting `teacher` is a URL."""
    return name.startswith(("http://", "https://"))


def check_given(given: GivenSettings) -> None:
    """Check the settings about the teacher that a user gave for a distillation.

    Raises UserError SETTING_INVALID if there is no teacher, if its URL has no host or may hold a
    key, or if `teacher_model` is missing beside a URL. Raises SETTING_NOT_APPLICABLE if
    `teacher_model` or `teacher_key_env` is given although the teacher is not a URL: of an endpoint
    by its name (`openai:NAME`), config.toml says both.
    """
    teacher = given.get("teacher")
    if not teacher:
        raise _invalid(
            "teacher",
            "algorithm distill has no teacher",
            'Name the model to become like, e.g. settings={"teacher": "arith-grpo-7@best"}.',
        )
    if not is_url(teacher):
        for name in ("teacher_model", "teacher_key_env"):
            if given.get(name):
                teacher_origin = (
                    "has it in config.toml" if is_endpoint(teacher) else "is a model here"
                )
                raise UserError(
                    "SETTING_NOT_APPLICABLE",
                    f"{name} is for a teacher behind a URL; teacher = {teacher!r} {teacher_origin}",
                    hint=f"Leave {name} out, or give the URL as teacher.",
                    field=f"settings.{name}",
                )
        return
    if not urlsplit(teacher).hostname:
        raise _invalid(
            "teacher", f"teacher = {teacher!r} is no URL", "e.g. http://127.0.0.1:8000/v1"
        )
    if urlsplit(teacher).username or urlsplit(teacher).query:
        raise _invalid(
            "teacher",
            "the URL of the teacher holds a user or a query, where keys tend to stand",
            "Set a variable such as TEACHER_API_KEY and name it as teacher_key_env.",
        )
    if not given.get("teacher_model"):
        raise _invalid(
            "teacher",
            f"teacher = {teacher!r} is a URL, and teacher_model does not say which model there",
            "Give its name as the server lists it under /v1/models.",
        )


def _endpoint_teacher(settings: DistillSettings) -> EndpointTeacher:
    """Describe the teacher at a URL. Raises UserError ENV_SECRETS if its key is not set."""
    entry = EndpointTeacher(
        url=settings.teacher.rstrip("/"),
        model=settings.teacher_model,
        key_env=settings.teacher_key_env,
    )
    missing = missing_key(entry, os.environ)
    if missing:
        raise UserError(
            "ENV_SECRETS",
            f"the teacher's key is not here: {missing} is not set in this server's environment",
            hint="Set it where the server is started (never in a tool argument), then call again.",
            field="settings.teacher_key_env",
            retryable=True,
        )
    return entry


def _named_teacher(home: Home, ref: str) -> EndpointTeacher:
    """Describe the teacher that config.toml names; `ref` is such as "openai:big".

    Raises UserError MODEL_NOT_FOUND if there is no such endpoint, ENV_SECRETS if its key is not
    set, SETTING_INVALID if it has a price: what a distillation asks of it is not counted.
    """
    endpoint = find_endpoint(home, ref, "settings.teacher")
    if endpoint.price_in or endpoint.price_out:
        raise _invalid(
            "teacher",
            f"teacher = {ref!r} has a price in config.toml, and what a distillation asks of its "
            "teacher is neither counted nor capped",
            "Learn from its answers, whose cost is capped: evaluate on split train with max_cost, "
            "curate, then algorithm sft. For a server of your own leave price_in and price_out "
            "out.",
        )
    return EndpointTeacher(url=endpoint.url, model=endpoint.model, key_env=endpoint.key_env)


def resolve_teacher(
    home: Home, settings: TrainSettings, student: ModelRef
) -> ResolvedTeacher | None:
    """Find the teacher that the settings of a distillation name; None for any other algorithm.

    `student` is the model that the run trains.

    Raises UserError MODEL_* if the teacher is not here or cannot be used, SETTING_INVALID if the
    teacher has another tokenizer or is the student itself, ENV_SECRETS if the key of a teacher
    behind a URL is not set.
    """
    if not isinstance(settings, DistillSettings):
        return None
    if is_url(settings.teacher):
        return ResolvedTeacher(_endpoint_teacher(settings))
    if is_endpoint(settings.teacher):
        return ResolvedTeacher(_named_teacher(home, settings.teacher))
    teacher = _local_model(home, settings.teacher)
    if (teacher.base_path, teacher.adapter) == (student.base_path, student.adapter):
        raise _invalid(
            "teacher",
            f"teacher = {settings.teacher!r} is the model that is trained",
            "Name a better one: a run of it, or a larger model of its family.",
        )
    check_same_tokens(student, teacher)
    entry = LocalTeacher(  # for config.json
        ref=teacher.ref,
        base_path=str(teacher.base_path),
        adapter=str(teacher.adapter) if teacher.adapter else None,
    )
    return ResolvedTeacher(entry, teacher, shares_base=teacher.base_path == student.base_path)


def _local_model(home: Home, name: str) -> ModelRef:
    """Find the model of this home or machine that the setting `teacher` names.

    Raises UserError MODEL_* if there is no such model or it cannot be used.
    """
    try:
        return catalog.resolve_model(home, name)
    except UserError as error:  # the error names the argument `model`, but this is the setting
        raise UserError(
            error.code,
            f"teacher: {error.message}",
            hint=error.advice,
            field="settings.teacher",
        ) from error


def missing_key(entry: EndpointTeacher, environment: Mapping[str, str]) -> str:
    """Return the name of the environment variable that should hold the key of the teacher `entry`.

    Returns "" if the variable is set in `environment`, or if the teacher needs no key.
    """
    is_available = not entry.key_env or bool(environment.get(entry.key_env))
    return "" if is_available else entry.key_env


def check_same_tokens(student: ModelRef, teacher: ModelRef) -> None:
    """Raise UserError SETTING_INVALID unless both models read every token id as the same text.

    Chat templates may differ, because the teacher gets the student's token ids and never renders a
    message.
    """
    if student.base_path == teacher.base_path:
        return
    # Each vocabulary is a mapping of token texts to ids.
    student_ids = tokens.load(student.base_path).vocabulary
    teacher_ids = tokens.load(teacher.base_path).vocabulary
    if student_ids == teacher_ids:
        return
    differing = sum(teacher_ids.get(text) != token_id for text, token_id in student_ids.items())
    raise _invalid(
        "teacher",
        f"the tokenizer of {teacher.ref} ({teacher.base_ref}) is not that of {student.ref} "
        f"({student.base_ref}): {differing} of {len(student_ids)} tokens have another id there",
        "A teacher rates the student's own tokens: take a model of the same family.",
    )


def _invalid(name: str, message: str, hint: str) -> UserError:
    """Make the error SETTING_INVALID for the setting `name`."""
    return UserError("SETTING_INVALID", message, hint=hint, field=f"settings.{name}")
