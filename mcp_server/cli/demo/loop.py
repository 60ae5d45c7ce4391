"""`honesmith demo`: the whole loop on one base model, through a real MCP client.

The demo uses what an agent uses: the server over stdio, runs as detached workers, and the verdict
from held-out answers. At the end it shows the verdict, the answers of the model before and after
training to the same question, and the report. `plans.py` says what is trained.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult
from rich.console import Console
from rich.text import Text

import envs
from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.reply import Reply
from engine.evidence.report.html_report import write_report
from engine.evidence.verdict.regression import kept_skills
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home
from engine.models import library
from engine.models.known_models import KNOWN
from mcp_server.access.audit_log import call_with_audit_log
from mcp_server.api import verbs
from mcp_server.api.replies import clean
from mcp_server.cli.demo.plans import DEFAULT, PLANS, DemoPlan, TrainingPlan
from mcp_server.cli.demo.result import column, ending, is_better, show_result
from mcp_server.screen.display import Stage, Step, progress_text, stage_console
from mcp_server.screen.terminal import FAILED, OK, show

MAX_GPU_HOURS = 1.0
MAX_LOADING_CALLS = 20  # each waits up to 40 s for a model that is being loaded
POLL_S = 2.0  # seconds of a single wait for a run; after each the progress is shown
INTERRUPTED = 130  # exit status after a Ctrl-C, as shells have it
CURVES = {"sft": "loss", "grpo": "reward_mean"}  # the metric that is drawn, by algorithm
HELDOUT_METRIC = "heldout_success"
LOG_ROWS = 200  # more than the demo has steps


class DemoFailed(Exception):
    """A tool call was refused or a run failed; the text says which one, and why."""


@dataclass
class Scene:
    """What one demo has made so far, to be shown at the end and cleaned up.

    Attributes:
        home: the home in which the demo runs.
        plan: what it trains.
        seed: seed of training and sampling.
        runs: ids of the runs that the demo has submitted.
        served_models: names of the models that the demo has deployed.
        facts: what `--json` prints at the end.
    """

    home: Home
    plan: DemoPlan
    seed: int
    runs: list[str] = field(default_factory=list)
    served_models: list[str] = field(default_factory=list)
    facts: Reply = field(default_factory=dict)


def run_demo(
    home: Path | None, *, model: str = DEFAULT, seed: int = 0, as_json: bool = False
) -> int:
    """Run the demo of a base model: train, judge, deploy and ask it, and show each step.

    Args:
        home: the home folder; None: the default one.
        model: name of a base model, a key of `PLANS`.
        seed: seed of training and sampling.
        as_json: print the facts as JSON on stdout, and the progress on stderr.

    Returns:
        The exit status: OK only if both runs are judged better, `INTERRUPTED` after a Ctrl-C,
        otherwise FAILED.

    Raises:
        UserError: BAD_ARGUMENT if no demo trains this model.
    """
    _check_model(model)
    scene = Scene(Home.locate(home), PLANS[model], seed)
    console = stage_console(quiet=as_json)
    started = time.monotonic()
    if not _run_scene(scene, console):
        return INTERRUPTED
    better = is_better(scene.facts)
    scene.facts |= {"better": better, "seconds": round(time.monotonic() - started, 1)}
    if "error" not in scene.facts:
        show_result(console, scene.plan, scene.facts)
    if as_json:
        show(scene.facts, as_json=True)
    return OK if better else FAILED


def _run_scene(scene: Scene, console: Console) -> bool:
    """Run the demo described by `scene`, and afterwards stop everything that it started, however it
    ends.

    If the demo fails, the reason is printed and stored in `scene.facts["error"]`. Returns False
    only after a Ctrl-C, otherwise True, also after a failure.
    """
    try:
        asyncio.run(_run_with_client(scene, console))
    except KeyboardInterrupt:
        _clean_up(scene, cancel_reason="the demo was interrupted")
        console.print("Stopped; the demo's runs are cancelled.")
        return False
    except DemoFailed as error:
        _clean_up(scene, cancel_reason="the demo failed")
        console.print(Text(f"The demo failed: {error}", style="bold red"))
        scene.facts["error"] = str(error)
    except BaseException:  # a bug, or an exit: no run or deployment may stay behind
        _clean_up(scene, cancel_reason="the demo ended early")
        raise
    else:
        _clean_up(scene, cancel_reason="")  # no run is left to cancel
    return True


def _check_model(model: str) -> None:
    """Raise UserError BAD_ARGUMENT if no demo trains this model."""
    if model not in PLANS:
        raise UserError(
            "BAD_ARGUMENT",
            f"there is no demo of {model!r}",
            hint=f"Choose one of {', '.join(PLANS)}.",
            field="model",
        )


async def _run_with_client(scene: Scene, console: Console) -> None:
    """Start a server, call its tools through an MCP client, and show each call as a step.

    Raises:
        DemoFailed: if a tool call is refused or a run fails.
    """
    examples = Path(str(envs.__file__)).resolve().parent / "examples"  # environments to train on
    # -P: modules in the current folder must not replace ours.
    argv = ["-P", "-m", "mcp_server.cli", "serve"]
    argv += ["--home", str(scene.home.root), "--root", str(examples)]
    server = StdioServerParameters(command=sys.executable, args=argv, env=dict(os.environ))
    title = f"Honesmith demo: {scene.plan.title}, home {scene.home.root}"
    failure: DemoFailed | None = None
    async with Client(server) as client:
        try:
            with Stage(title, console) as stage:
                await _run_loop(_ToolCaller(client, stage), scene, examples)
        # The error is raised after the block: the client would wrap it in exception groups.
        except DemoFailed as error:
            failure = error
    if failure is not None:
        raise failure


async def _run_loop(caller: "_ToolCaller", scene: Scene, examples: Path) -> None:
    """Call the tools one after the other, as an agent would, and store the results in `scene`.

    `examples` is the folder with the environments to train on. Raises DemoFailed if a tool call is
    refused or a run fails.
    """
    base_model = scene.plan.model
    await caller.call("get_status", {})
    await caller.read("read_playbook", {"section": "loop"})
    if base_model in KNOWN:
        await caller.fetch_model(scene.home, base_model)
    trainings = await _train_all(caller, scene, examples)
    last = trainings[-1]
    await caller.call("read_rollouts", {"run_id": last.run_id, "pick": "best", "limit": 1})
    comparisons = await _judge(caller, scene, trainings)
    chats = await _ask(caller, scene, trainings)
    reports = _write_reports(scene, trainings)
    scene.facts |= {
        **_facts_of_trainings(scene, trainings),
        "compared": comparisons,
        "chats": chats,
        "chat": chats[last.plan.algorithm],  # "chat" and "report" are those of the last training
        "reports": reports,
        "report": reports[-1],
    }


def _facts_of_trainings(scene: Scene, trainings: Sequence["_FinishedTraining"]) -> Reply:
    """Return the facts about the trainings of the demo, for `Scene.facts`:

    - `env_id`: the version of the last environment.
    - `runs`: algorithm -> the last status of its run.
    - `kept_skills`: algorithm -> a sentence on what became of skills that the model had before.
    """
    runs, kept_skills = {}, {}
    for training in trainings:
        runs[training.plan.algorithm] = training.run
        kept_skills[training.plan.algorithm] = _kept_skills(scene, training)
    return {"env_id": trainings[-1].env_id, "runs": runs, "kept_skills": kept_skills}


def _write_reports(scene: Scene, trainings: Sequence["_FinishedTraining"]) -> list[str]:
    """Write a report of the last run on each environment, and return the paths of the reports."""
    # A later training on the same environment replaces the earlier one.
    last_of_env = {training.env_id: training for training in trainings}
    return [str(write_report(scene.home, training.run_id)) for training in last_of_env.values()]


@dataclass(frozen=True)
class _FinishedTraining:
    """A finished training run of the demo.

    Attributes:
        plan: what was trained.
        env_id: the version of its environment.
        start_model: the reference of the model that it started from.
        run: the last status of the run.
    """

    plan: TrainingPlan
    env_id: str
    start_model: str
    run: Reply

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.run["run_id"]

    @property
    def model(self) -> str:
        """The reference of the model that the run made: its best checkpoint."""
        return f"{self.run_id}@best"


async def _train_all(
    caller: "_ToolCaller", scene: Scene, examples: Path
) -> list[_FinishedTraining]:
    """Run all trainings of the demo's plan, one after the other.

    Before the first training on an environment, the environment is pushed from the folder
    `examples`, and the training is checked (dry_run) and its cost estimated.

    Raises:
        DemoFailed: if a tool call is refused, or if a run does not end as done.
    """
    env_ids: dict[str, str] = {}  # by the name of the environment's folder
    trainings: list[_FinishedTraining] = []
    for plan in scene.plan.trainings:
        is_new_env = plan.env not in env_ids
        if is_new_env:
            env_ids[plan.env] = await _push(caller, examples / plan.env)
        env_id = env_ids[plan.env]
        start_model = trainings[-1].model if plan.continues else scene.plan.model
        arguments = _arguments(plan, env_id, start_model, scene.seed)
        if is_new_env:
            await caller.call("dry_run", arguments)
            await caller.call("estimate_cost", arguments)
        run = await _train(caller, scene, plan, arguments)
        trainings.append(_FinishedTraining(plan, env_id, start_model, run))
    return trainings


async def _push(caller: "_ToolCaller", folder: Path) -> str:
    """Push the environment in `folder` and return the id of its version. Raises DemoFailed if the
    call is refused."""
    pushed = await caller.call("push_env", {"path": str(folder)})
    return pushed["env_id"]


def _kept_skills(scene: Scene, training: _FinishedTraining) -> str:
    """Return a sentence on what became of the skills that the model had before a run; "" if the run
    did not test them."""
    skills = kept_skills(scene.home.run(training.run_id))
    return skills.summary if skills else ""


def _arguments(training: TrainingPlan, env_id: str, model: str, seed: int) -> JsonObject:
    """Return the arguments of `dry_run`, `estimate_cost` and `submit_train` that describe one
    training of the demo.

    Args:
        training: its algorithm and settings.
        env_id: the version of the environment.
        model: the model that the training starts from.
        seed: seed of training and sampling.
    """
    settings = {**training.settings, "seed": seed}
    return {
        "env_id": env_id,
        "model": model,
        "algorithm": training.algorithm,
        "settings": settings,
    }


async def _judge(
    caller: "_ToolCaller", scene: Scene, trainings: Sequence[_FinishedTraining]
) -> dict[str, Reply]:
    """Evaluate the models on held-out tasks, and compare each with the one that it started from.

    Models trained on the same environment are evaluated together. Returns algorithm -> reply of
    `compare_runs`. Raises DemoFailed if a tool call is refused or an evaluation fails.
    """
    comparisons = {}
    env_ids = list(dict.fromkeys(training.env_id for training in trainings))  # each once
    for env_id in env_ids:
        trainings_on_env = [training for training in trainings if training.env_id == env_id]
        await _evaluate(caller, scene, env_id, trainings_on_env)
        for training in trainings_on_env:
            comparisons[training.plan.algorithm] = await caller.call(
                "compare_runs", {"ids": [training.start_model, training.model], "env_id": env_id}
            )
    return comparisons


async def _evaluate(
    caller: "_ToolCaller", scene: Scene, env_id: str, trainings: Sequence[_FinishedTraining]
) -> None:
    """Evaluate the models that these trainings on one environment made, and those that they started
    from, and wait for the end. Raises DemoFailed if a call is refused or the evaluation fails."""
    names = [name for training in trainings for name in (training.start_model, training.model)]
    models = list(dict.fromkeys(names))  # each once: a training may start from another's model
    evaluation = await caller.call(
        "evaluate", {"env_id": env_id, "models": models, "rows": scene.plan.evaluated_rows}
    )
    scene.runs.append(evaluation["run_id"])
    await caller.wait(evaluation["run_id"], metric="")  # an evaluation has no curve to draw


async def _ask(
    caller: "_ToolCaller", scene: Scene, trainings: Sequence[_FinishedTraining]
) -> dict[str, Reply]:
    """Deploy each model whose training has a question, and ask it and the base model that question.

    Returns algorithm -> reply of `chat`. Raises DemoFailed if a tool call is refused.
    """
    chats = {}
    base_model = scene.plan.model
    for training in trainings:
        if not training.plan.question:
            continue
        # The list is updated before the calls, so that these models are stopped after a failure
        # too. The chat also deploys the base model, to compare with. At the end of the demo all are
        # stopped in the order of this list, the base model last.
        served_before = [name for name in scene.served_models if name != base_model]
        scene.served_models = [*served_before, training.model, base_model]
        await caller.call("deploy", {"run_id": training.model})
        chats[training.plan.algorithm] = await caller.chat(
            {
                "model": training.model,
                "message": training.plan.question,
                "compare_to": base_model,
                "max_tokens": training.plan.answer_tokens,
            },
        )
    return chats


async def _train(
    caller: "_ToolCaller", scene: Scene, training: TrainingPlan, arguments: JsonObject
) -> Reply:
    """Submit a training run, wait for its end, and return its last status.

    `arguments` are those of `submit_train` that name the environment, the model and the settings.

    Raises:
        DemoFailed: if the submit is refused, or if the run does not end as done.
    """
    algorithm = training.algorithm
    submit_arguments = arguments | {"note": training.note, "max_gpu_hours": MAX_GPU_HOURS}
    if training.expect:
        submit_arguments["expect"] = training.expect
    submit_reply = await caller.call(
        "submit_train", submit_arguments, step_name=f"submit {algorithm}"
    )
    scene.runs.append(submit_reply["run_id"])
    return await caller.wait(submit_reply["run_id"], metric=CURVES[algorithm])


class _ToolCaller:
    """Calls the server's tools and shows each call as a step on the screen."""

    def __init__(self, client: Client, stage: Stage) -> None:
        """Call tools through `client`, and show the steps on `stage`."""
        self._client = client
        self._stage = stage

    async def call(self, tool: str, arguments: JsonObject, step_name: str = "") -> Reply:
        """Call a tool as one step, and return its reply.

        The step is named `step_name`; if that is "", it has the name of the tool.

        Raises:
            DemoFailed: if the call is refused.
        """
        step = self._stage.begin(step_name or tool)
        reply = await self._call_tool(tool, arguments)
        self._stage.end(step, str(reply["summary"]))
        return reply

    async def chat(self, arguments: JsonObject) -> Reply:
        """Call the tool `chat` as one step, and return its reply with whole answers.

        If an answer is not finished when the call returns, further calls fetch the rest.

        Raises:
            DemoFailed: if a call is refused.
        """
        step = self._stage.begin("chat")
        reply = await self._call_tool("chat", arguments)
        for answer in reply["answers"]:
            await self._complete(step, answer, reply, arguments["max_tokens"])
        self._stage.end(step, str(reply["summary"]))
        return reply

    async def _complete(self, step: Step, answer: Reply, reply: Reply, max_tokens: int) -> None:
        """Fetch the rest of `answer`, if it is not complete yet, and append it in place.

        `reply` is the reply of the chat, which names the conversation; `max_tokens` is how many
        tokens the whole answer may have. Raises DemoFailed if a call is refused.
        """
        last_part = answer
        while last_part.get("partial"):  # the call returned before the answer was complete
            self._stage.show_progress(step, f"{answer['model']}: {answer['tokens']} tokens")
            continuation = {
                "model": answer["model"],
                "conversation": reply["conversation"],
                "max_tokens": max(1, max_tokens - answer["tokens"]),
            }
            [last_part] = (await self._call_tool("chat", continuation))["answers"]
            answer["answer"] += last_part["answer"]
            answer["tokens"] += last_part["tokens"]

    async def fetch_model(self, home: Home, name: str) -> None:
        """Fetch the model `name` (one of `KNOWN`) into the home as one step, unless it is there.

        Raises:
            DemoFailed: if the model cannot be fetched.
        """
        step = self._stage.begin("models add", name)

        def show_line(line: str) -> None:
            """Show a line about the download as the progress of the step."""
            self._stage.show_progress(step, line)

        add = partial(library.add, say=show_line)
        try:
            reply = await asyncio.to_thread(
                # name="": the model keeps the name that it is fetched by.
                call_with_audit_log,
                home,
                "add_model",
                add,
                source=name,
                name="",
            )
        except UserError as error:
            raise DemoFailed(f"{error.code}: {error.message}. {error.hint}") from error
        self._stage.end(step, str(reply["summary"]))

    async def read(self, tool: str, arguments: JsonObject) -> None:
        """Call a tool whose result is a text, as one step, and show the first line of the text.

        Raises:
            DemoFailed: if the call is refused.
        """
        step = self._stage.begin(tool)
        result = await self._client.call_tool(tool, arguments)
        text = _text_of(result)
        if result.is_error:
            raise DemoFailed(f"{tool}: {text}")
        first_line = text.strip().splitlines()[0]
        self._stage.end(step, first_line.lstrip("# "))  # lstrip: it is a Markdown heading

    async def wait(self, run_id: str, metric: str) -> Reply:
        """Wait until a run ends, without a time limit, and return its last status.

        Meanwhile the progress is shown, with the curve of `metric`; "" for no curve.

        Raises:
            DemoFailed: if the run does not end as done, or if a call is refused.
        """
        step = self._stage.begin("wait_run", run_id)
        reply = await self._poll(step, run_id, metric)
        if reply["state"] != "done":
            self._stage.end(step, str(reply["summary"]), failed=True)
            raise DemoFailed(f"{run_id} {reply['state']}: {reply.get('error') or reply['summary']}")
        self._stage.end(step, ending(reply))
        return reply

    async def _poll(self, step: Step, run_id: str, metric: str) -> Reply:
        """Ask for the status of a run, and show it in `step`, until the run ends.

        `metric` is the metric to draw; "" for none. Returns the last status. Raises DemoFailed if a
        call is refused.
        """
        cursor = ""
        while True:
            reply = await self._call_tool(
                "wait_run", {"run_id": run_id, "timeout_s": POLL_S, "cursor": cursor}
            )
            cursor = reply.get("cursor", "")
            if metric:
                await self._draw(step, reply, metric)
            else:
                self._stage.show_progress(step, progress_text(reply))
            if reply.get("state") in TERMINAL:
                return reply

    async def _draw(self, step: Step, reply: Reply, metric: str) -> None:
        """Show the progress of a run, whose status is `reply`, with the curve of `metric`.

        Beside the curve stand the latest values of `metric` and of the held-out success, if the run
        has measured them already.
        """
        logs = await self._call_tool(
            "read_logs",
            {"run_id": str(reply["run_id"]), "keys": [metric, HELDOUT_METRIC], "limit": LOG_ROWS},
        )
        curve = column(logs, metric)
        heldout = column(logs, HELDOUT_METRIC)
        latest_values = []
        if curve:
            latest_values.append(f"{metric} {curve[-1]:.3f}")
        if heldout:
            latest_values.append(f"held-out {heldout[-1]:.3f}")
        text = progress_text(reply, "  ".join(latest_values))
        self._stage.show_progress(step, text, curve)

    async def _call_tool(self, tool: str, arguments: JsonObject) -> Reply:
        """Call a tool and return its reply. While a model is still being loaded, call it again.

        Raises:
            DemoFailed: if the call is refused; the text is that of the tool's error.
        """
        result = await self._client.call_tool(tool, arguments)
        calls_left = MAX_LOADING_CALLS
        while calls_left and result.is_error and _is_loading(result):
            result = await self._client.call_tool(tool, arguments)
            calls_left -= 1
        if result.is_error or result.structured_content is None:
            raise DemoFailed(f"{tool}: {_text_of(result)}")
        return result.structured_content


def _is_loading(result: CallToolResult) -> bool:
    """Whether an error result of a tool says that a model is still being loaded for serving, so
    that the call can be made again. False for an error that is not JSON."""
    try:
        error = json.loads(_text_of(result))
    except ValueError:
        return False
    return error.get("code") == "DEPLOY_FAILED" and bool(error.get("retryable"))


def _text_of(result: CallToolResult) -> str:
    """Return the text of a tool's result; parts that are not text are left out."""
    return "".join(getattr(part, "text", "") for part in result.content)


def _clean_up(scene: Scene, cancel_reason: str) -> None:
    """Stop the models that the demo has deployed, and cancel its runs unless `cancel_reason` is "".

    This calls the engine and not the server, because a Ctrl-C has ended the server too. Errors are
    printed on stderr.
    """
    runs_to_cancel = scene.runs if cancel_reason else []  # after a success all runs have ended
    for run_id in runs_to_cancel:
        try:
            verbs.cancel_run(scene.home, run_id, cancel_reason)
        except UserError as error:
            sys.stderr.write(f"{run_id}: {clean(error.message)}\n")
    for model in scene.served_models:
        try:
            verbs.deploy(scene.home, model, action="stop")
        except UserError as error:
            sys.stderr.write(f"{model}: {clean(error.message)}\n")
