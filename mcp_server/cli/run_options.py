"""The arguments and options of the commands about runs, one class for each larger command."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.reply import LEAST_ROLLOUT_CHARS, MOST_ROLLOUT_CHARS, MOST_ROLLOUTS, Reply
from engine.home.rows import DEFAULT_GPU_HOURS
from engine.runs.submit.requests import TrainRequest
from engine.serving.chat_request import DRAW_SEED, ChatRequest
from mcp_server.screen.terminal import Sets, settings_from

RunId = Annotated[str, typer.Argument(metavar="RUN", help="A run; a unique prefix will do.")]
Env = Annotated[str, typer.Argument(metavar="ENV", help="A pushed environment.")]
Scope = Literal["all", "hardware", "runs", "envs", "models", "datasets", "deployments"]
Until = Annotated[Literal["end", "first_step", "next_eval", "alert", "news"], typer.Option()]
Pick = Literal["worst", "best", "random", "median", "truncated", "error", "group", "changed"]
Select = Literal["correct", "best", "best_n", "shortest", "all", "pairs"]
Limit = Annotated[int, typer.Option("--limit", min=1, help="How many.")]
Wait = Annotated[bool, typer.Option("--wait", help="Stay until it ends.")]


@dataclass(frozen=True)
class PlanOptions:
    """The options of `honesmith train`, `dry-run` and `estimate` that say what to train. "" means
    that the TOML files decide, or else the default."""

    env: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENV|FILE.toml...]",
            help="An environment, or TOML files: a later one replaces what earlier ones say.",
        ),
    ] = None
    model: Annotated[
        str, typer.Option(help="pebble, a path, a hub id or a run. Default: pebble, or the file's.")
    ] = ""
    algorithm: Annotated[
        Literal["", "sft", "dpo", "grpo", "distill", "prompt"],
        typer.Option(
            metavar="<sft|dpo|grpo|distill|prompt>", help="Default: grpo, or what the file says."
        ),
    ] = ""
    teacher: Annotated[
        str, typer.Option(help="Of distill: a model as --model takes it, or a URL.")
    ] = ""
    settings: Sets = None
    max_gpu_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Cap on device hours, of a plan on all its runs together.",
            show_default=f"{DEFAULT_GPU_HOURS}, a resumed one: its own",
        ),
    ] = None
    then: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|JSON",
            help="A further step, from the best of the one before (repeatable), e.g. "
            '\'{"algorithm": "grpo"}\' or \'{"algorithm": "evaluate"}\'.',
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES", help="All of it once for each value, e.g. --vary seed=1,2,3."
        ),
    ] = None

    def plan_request(self) -> "PlannedRequest":
        """Make the request for a run or a plan (several runs) from the options and the TOML files
        that `env` names.

        An option replaces the value in the files; `--set` replaces single settings. Raises
        UserError if a file cannot be read, if a `--set` is not NAME=VALUE, or if more than one
        environment is named.
        """
        request = TrainRequest(
            max_gpu_hours=self.max_gpu_hours,
            then=_json_objects("then", self.then),
            vary=_varied_settings(self.vary),
        )
        files: list[JsonObject] = []
        names = self.env or []
        if any(name.endswith(".toml") for name in names):
            request, files = _with_toml_files(request, names)
        elif len(names) > 1:
            raise _second_env_error(names)
        else:
            request = replace(request, env_id=names[0] if names else "")
        request = replace(
            request,
            model=self.model or request.model,
            algorithm=self.algorithm or request.algorithm,
        )
        return self._with_own_settings(request, files)

    def _with_own_settings(
        self, request: TrainRequest, files: list[JsonObject]
    ) -> "PlannedRequest":
        """Return `request` with the settings of the command line in place of those with the same
        names, together with what each file and the command line set.

        Args:
            request: what the files and the other options ask for.
            files: for each TOML file, what it set and changed. An entry for the settings of the
                command line is added, if there are any.
        """
        # --teacher is short for --set teacher=...
        teacher = {"teacher": self.teacher} if self.teacher else {}
        command_line_settings = {**teacher, **settings_from(self.settings)}
        if not files:
            settings = {**request.settings, **command_line_settings}
            return PlannedRequest(replace(request, settings=settings))
        # Imported late: loading the schema of the settings takes longer than all else here.
        from engine.settings.train_files import with_settings  # noqa: PLC0415

        settings, change = with_settings(request.settings, command_line_settings, "--set")
        described_files = [*files, change.to_json()] if command_line_settings else files
        return PlannedRequest(replace(request, settings=settings), described_files)


@dataclass(frozen=True)
class PlannedRequest:
    """A request, and for each TOML file what it set and changed, in order of merging; () if the
    request comes from options alone."""

    request: TrainRequest
    files: Sequence[JsonObject] = ()

    def reply_with_files(self, reply: Reply) -> Reply:
        """Return `reply`, the reply to this request, with the field `files`: what each TOML file
        set. Unless several files were merged, `reply` is returned unchanged."""
        if len(self.files) <= 1:
            return reply
        return reply | {"files": list(self.files)}


@dataclass(frozen=True)
class TrainOptions(PlanOptions):
    """Options of `honesmith train`."""

    note: Annotated[str, typer.Option(help="Why this run.")] = ""
    expect: Annotated[
        str, typer.Option(help="better, no_difference, or a target such as 90 %.")
    ] = ""
    parent: Annotated[str, typer.Option(help="Run to compare the settings with.")] = ""
    request_id: Annotated[str, typer.Option(help="Makes a retry safe.")] = ""
    resume: Annotated[str, typer.Option(metavar="RUN", help="Continue a run.")] = ""
    yes: Annotated[
        bool, typer.Option("--yes", help="Agree to a spend above auto_approve_gpu_hours.")
    ] = False
    profile: Annotated[
        bool, typer.Option("--profile", help="Leave a trace of two steps in the run's logs.")
    ] = False

    def plan_request(self) -> PlannedRequest:
        """Make the request as `PlanOptions.plan_request` does, with the options of `train` added. A
        resumed run (`--resume`) keeps its environment, so `env` is then ignored."""
        options = replace(self, env=None) if self.resume else self
        planned = PlanOptions.plan_request(options)  # not super(): `options` may be a changed copy
        request = replace(
            planned.request,
            note=self.note,
            expect=self.expect,
            parent=self.parent,
            request_id=self.request_id,
            resume=self.resume,
            approved=self.yes,
            profile=self.profile,
        )
        return replace(planned, request=request)


@dataclass(frozen=True)
class LogOptions:
    """Which lines of a run `honesmith logs` shows."""

    view: Annotated[Literal["metrics", "events", "console", "error"], typer.Option()] = "metrics"
    keys: Annotated[list[str] | None, typer.Option("--key", help="A metric.")] = None
    grep: Annotated[str, typer.Option(help="Only lines with this text.")] = ""
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False
    all_columns: Annotated[
        bool, typer.Option("--all", help="Every column, however narrow it is here.")
    ] = False
    limit: Limit = 50
    cursor: str = ""


@dataclass(frozen=True)
class RolloutOptions:
    """Which rollouts of a run `honesmith rollouts` shows, and how much of each."""

    pick: Annotated[Pick, typer.Option()] = "worst"
    step: Annotated[int, typer.Option(min=-1, help="-1: the latest.")] = -1
    where: Annotated[str, typer.Option(help='e.g. "reward < 0.5".')] = ""
    tokens: Annotated[bool, typer.Option("--tokens", help="Ids and loss mask.")] = False
    limit: Annotated[int, typer.Option(min=1, max=MOST_ROLLOUTS, help="How many.")] = 3
    max_chars: Annotated[
        int, typer.Option(min=LEAST_ROLLOUT_CHARS, max=MOST_ROLLOUT_CHARS, help="Of each text.")
    ] = 1200
    cursor: str = ""


@dataclass(frozen=True)
class EvaluationOptions:
    """Which models `honesmith evaluate` scores, and on what."""

    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Models to score.")
    ] = None
    split: Annotated[Literal["heldout", "dev", "train"], typer.Option()] = "heldout"
    rows: Annotated[int, typer.Option(min=1, help="Tasks.")] = 100
    attempts: Annotated[int, typer.Option(min=1, help="Per task.")] = 1
    settings: Sets = None
    regrade: Annotated[
        str, typer.Option(metavar="RUN", help="Score this run's stored answers again instead.")
    ] = ""
    task_indices: Annotated[
        str,
        typer.Option(
            metavar="LIST", help='These tasks of the split instead of --rows, as "0-9,12".'
        ),
    ] = ""
    perturb: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<all|wording|system|tools|options>",
            help="Ask the same tasks in these other words too (repeatable).",
        ),
    ] = None


@dataclass(frozen=True)
class CurateOptions:
    """Which stored answers `honesmith curate` takes, and what the dataset is called."""

    sources: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Evaluations or GRPO runs.")
    ]
    name: Annotated[str, typer.Option(help="Of the dataset.")]
    where: Annotated[str, typer.Option(help='Per task, e.g. "0 < avg < 1".')] = ""
    select: Annotated[Select, typer.Option()] = "correct"
    max_per_task: Annotated[int, typer.Option(min=1, help="Answers kept.")] = 1
    pool_models: Annotated[
        bool, typer.Option("--pool-models", help="One group per task, whoever answered.")
    ] = False
    save: Annotated[bool, typer.Option("--save", help="Not only a preview.")] = False


@dataclass(frozen=True)
class ChatOptions:
    """What `honesmith chat` asks, and of whom."""

    model: Annotated[str, typer.Argument(help="pebble, a path, a hub id or a run.")]
    message: Annotated[
        str, typer.Argument(help="What to say; without it, a conversation in the terminal.")
    ] = ""
    system: Annotated[str, typer.Option(help="System prompt.")] = ""
    messages: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|JSON", help="Earlier turns in OpenAI's form (repeatable)."),
    ] = None
    tools: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|JSON", help="What it may call, in OpenAI's form (repeatable)."),
    ] = None
    conversation: Annotated[
        str, typer.Option(metavar="ID", help="Go on; without a message with a cut answer.")
    ] = ""
    compare_to: Annotated[str, typer.Option(help="A second model.")] = ""
    max_tokens: Annotated[int, typer.Option(min=1)] = 512
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0
    seed: Annotated[
        int, typer.Option(min=DRAW_SEED, help="Same seed, same answer.", show_default="drawn")
    ] = DRAW_SEED

    def request(self) -> ChatRequest:
        """Make the request of a chat. Raises UserError BAD_ARGUMENT if a file cannot be read, or if
        `--messages` or `--tools` is not made of JSON objects."""
        return ChatRequest(
            model=self.model,
            message=self.message,
            system=self.system,
            compare_to=self.compare_to,
            messages=_json_objects("messages", self.messages),
            tools=_json_objects("tools", self.tools),
            conversation=self.conversation,
            seed=self.seed,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
        )


def _json_objects(option: str, values: Sequence[str] | None) -> list[JsonObject]:
    """Read the JSON objects in the values of a repeated option, in order.

    Each value is a JSON object, a JSON list of objects, or the name of a file that holds one of the
    two. `option` is the name of the option, for errors. Raises UserError BAD_ARGUMENT if a file
    cannot be read, or if a value is not JSON or holds anything but objects.
    """
    objects: list[JsonObject] = []
    for value in values or ():
        try:
            # A value that begins with [ or { is JSON; any other is the name of a file.
            text = value if value.lstrip().startswith(("[", "{")) else Path(value).read_text()
            parsed = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise _no_json_objects(option, value, f"cannot be read: {error}") from error
        items = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(item, dict) for item in items):
            raise _no_json_objects(option, value, "holds something else than objects")
        objects += items
    return objects


def _no_json_objects(option: str, value: str, fault: str) -> UserError:
    """Make the error for a `value` of `option` that is not made of JSON objects; `fault` says why,
    e.g. "cannot be read: ..."."""
    return UserError(
        "BAD_ARGUMENT",
        f"--{option} {value[:80]} {fault}",
        hint="It takes a file with a JSON list of objects, or the JSON itself.",
        field=option,
    )


def _varied_settings(assignments: Sequence[str] | None) -> JsonObject:
    """Read varied settings: ["seed=1,2", "loss=dapo,grpo"] becomes {"seed": [1, 2], "loss":
    ["dapo", "grpo"]}. A JSON list, as in "seed=[1, 2]", is taken as the list of values.

    Raises UserError BAD_ARGUMENT if an assignment has no "=" or no name, or if a name is given
    twice.
    """
    varied: JsonObject = {}
    for assignment in assignments or ():
        # `values` is what stands behind "=": JSON, or else a text.
        ((name, values),) = settings_from([assignment], option="vary").items()
        if name in varied:
            raise UserError(
                "BAD_ARGUMENT",
                f"--vary {name} is given twice",
                hint=f"Give all of its values at once, as in --vary {name}=1,2,3.",
                field="vary",
            )
        if isinstance(values, str):
            # Each value is read like that of an assignment of its own: as JSON, or else as a text.
            single_assignments = [f"{name}={value.strip()}" for value in values.split(",")]
            varied[name] = [settings_from([single])[name] for single in single_assignments]
        else:
            varied[name] = values if isinstance(values, list) else [values]
    return varied


def _with_toml_files(
    request: TrainRequest, names: Sequence[str]
) -> tuple[TrainRequest, list[JsonObject]]:
    """Return `request` completed by TOML files, and for each file what it set and changed.

    The files are merged in order: a later one replaces what an earlier one says. They decide the
    environment and the settings, and the model and the algorithm if they name one. If the command
    line gives `then` or a varied setting, it wins over the files.

    Args:
        request: the request from the other options.
        names: the arguments of the command line; they must all end in .toml.

    Raises UserError if a file cannot be read, or if a name does not end in .toml.
    """
    other_names = [name for name in names if not name.endswith(".toml")]
    if other_names:
        raise _second_env_error(other_names)
    # Imported late: loading the schema of the settings takes longer than all else here.
    from engine.settings.train_files import load_files  # noqa: PLC0415

    plan = load_files([Path(name) for name in names])
    merged = replace(
        request,
        model=plan.model or request.model,
        algorithm=plan.algorithm or request.algorithm,
        env_id=plan.env,
        settings=plan.settings,
        then=request.then or plan.then,
        vary={**plan.vary, **request.vary},  # the later one wins: the command line
    )
    return merged, [file.to_json() for file in plan.files]


def _second_env_error(names: Sequence[str]) -> UserError:
    """Make the error for several environments on the command line, or for an environment beside a
    TOML file, which itself names the environment."""
    return UserError(
        "BAD_ARGUMENT",
        f"{' '.join(names)[:200]} cannot stand here",
        hint="Name one environment, or TOML files alone: the environment is their key env.",
        field="env_id",
    )
