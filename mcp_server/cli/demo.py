"""`honesmith demo`: the whole loop on the built-in model, through a real MCP client.

Everything is as it is for agents: the server over stdio, runs as detached workers, the verdict from
held-out answers. At the end the demo shows the verdict, the answers of the model before and after
training to the same question, and the path of the report.
"""

import asyncio
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult
from rich.console import Console
from rich.table import Table
from rich.text import Text

import envs
from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.evidence.report.html_report import write_report
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home
from engine.runs.submit.requests import GivenSettings
from mcp_server.api import verbs
from mcp_server.api.replies import clean
from mcp_server.screen.display import Stage, Step, progress_text, stage_console
from mcp_server.screen.render import VERDICTS, duration
from mcp_server.screen.terminal import FAILED, OK, show

# What the demo trains; every setting that is not named here has its default.
ENV = "arithmetic"
MODEL = "pebble"
SETTINGS: dict[str, GivenSettings] = {
    "sft": {"max_examples": 64, "batch_size": 8, "steps": 22, "eval_every": 11, "eval_rows": 400},
    "grpo": {"steps": 28, "eval_every": 14, "eval_rows": 400, "learning_rate": 1e-3},
}
EVALUATED_ROWS = 400
QUESTION = "Add 47 and 38. End with #### and the sum."
ANSWER_TOKENS = 32
MAX_GPU_HOURS = 1.0
POLL_S = 2.0  # the longest single wait for a run; then its progress is shown
INTERRUPTED = 130  # exit status after a Ctrl-C, as shells have it
CURVES = {"sft": "loss", "grpo": "reward_mean"}  # the metric that is drawn, by algorithm
HELDOUT_METRIC = "heldout_success"
LOG_ROWS = 200  # more than the demo has steps


class DemoFailed(Exception):
    """A tool refused or a run failed; the text says which, and why."""


@dataclass
class Scene:
    """What one demo has made so far, to be shown at the end and cleaned up.

    Attributes:
        home: the home in which the demo runs.
        seed: seed of training and sampling.
        runs: ids of the runs that the demo has submitted.
        served: names of the models that the demo has deployed.
        facts: what `--json` prints at the end.
    """

    home: Home
    seed: int
    runs: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    facts: Reply = field(default_factory=dict)


def run_demo(home: Path | None, *, seed: int = 0, as_json: bool = False) -> int:
    """Run the demo: train, judge, deploy and ask the built-in model, and show each step.

    Args:
        home: the home folder; None: the default one.
        seed: seed of training and sampling.
        as_json: print the facts as JSON on stdout, and the progress on stderr.

    Returns:
        The exit status: OK only if both runs are judged better, `INTERRUPTED` after a Ctrl-C,
        otherwise FAILED.
    """
    demo_home = Home.locate(home)
    scene = Scene(demo_home, seed)
    console = stage_console(quiet=as_json)
    started = time.monotonic()
    try:
        asyncio.run(_run_with_client(scene, console))
    except KeyboardInterrupt:
        _clean_up(scene, "the demo was interrupted")
        console.print("Stopped; the demo's runs are cancelled.")
        return INTERRUPTED
    except DemoFailed as error:
        _clean_up(scene, "the demo failed")
        console.print(Text(f"The demo failed: {error}", style="bold red"))
        scene.facts["error"] = str(error)
    except BaseException:  # a bug, or an exit: no run or deployment may stay behind
        _clean_up(scene, "the demo ended early")
        raise
    else:
        _clean_up(scene, cancel_reason="")
    is_better = _is_better(scene.facts)
    scene.facts |= {"better": is_better, "seconds": round(time.monotonic() - started, 1)}
    if "error" not in scene.facts:
        _show_result(console, scene, is_better)
    if as_json:
        show(scene.facts, as_json=True)
    return OK if is_better else FAILED


async def _run_with_client(scene: Scene, console: Console) -> None:
    """Start a server, call its tools through an MCP client, and show each call as a step.

    Raises:
        DemoFailed: a tool refused or a run failed.
    """
    examples = Path(str(envs.__file__)).resolve().parent / "examples"
    # -P: modules in the current folder must not replace ours.
    argv = ["-P", "-m", "mcp_server.cli", "serve"]
    argv += ["--home", str(scene.home.root), "--root", str(examples)]
    server = StdioServerParameters(command=sys.executable, args=argv, env=dict(os.environ))
    title = f"Honesmith demo: train {MODEL} on {ENV}, home {scene.home.root}"
    failure: DemoFailed | None = None
    async with Client(server) as client:
        try:
            with Stage(title, console) as stage:
                await _run_loop(_ToolCaller(client, stage), scene, examples / ENV)
        except DemoFailed as error:  # if raised in here, it would arrive in exception groups
            failure = error
    if failure is not None:
        raise failure


async def _run_loop(caller: "_ToolCaller", scene: Scene, folder: Path) -> None:
    """Call the tools one after the other, as an agent would, and note in `scene` what they make.

    The base model is trained by SFT, and the best checkpoint of that run by GRPO. `folder` is the
    environment to train on. Raises DemoFailed if a tool refuses or a run fails.
    """
    await caller.call("get_status", {})
    await caller.read("read_playbook", {"section": "loop"})
    environment = await caller.call("push_env", {"path": str(folder)})
    env_id = environment["env_id"]
    sft_plan = _plan(scene, env_id, MODEL, "sft")
    await caller.call("dry_run", sft_plan)
    await caller.call("estimate_cost", sft_plan)
    sft_run = await _train(caller, scene, sft_plan | {"note": "learn the answer's form"})
    sft_model = f"{sft_run['run_id']}@best"
    grpo_plan = _plan(scene, env_id, sft_model, "grpo")
    grpo_run = await _train(
        caller, scene, grpo_plan | {"note": "maximise right sums", "expect": "better"}
    )
    grpo_model = f"{grpo_run['run_id']}@best"
    await caller.call("read_rollouts", {"run_id": grpo_run["run_id"], "pick": "best", "limit": 1})
    comparisons = await _judge(caller, scene, env_id, [MODEL, sft_model, grpo_model])
    # The chat also deploys the base model, to compare with; both are stopped at the end.
    scene.served = [grpo_model, MODEL]
    await caller.call("deploy", {"run_id": grpo_model})
    answer = await caller.call(
        "chat",
        {
            "model": grpo_model,
            "message": QUESTION,
            "compare_to": MODEL,
            "max_tokens": ANSWER_TOKENS,
        },
    )
    scene.facts |= {
        "env_id": env_id,
        "runs": {"sft": sft_run, "grpo": grpo_run},
        "compared": comparisons,
        "chat": answer,
        "report": str(write_report(scene.home, grpo_run["run_id"])),
    }


def _plan(scene: Scene, env_id: str, model: str, algorithm: str) -> Reply:
    """The arguments by which a tool plans, or submits, a training run of the demo."""
    settings = {**SETTINGS[algorithm], "seed": scene.seed}
    return {"env_id": env_id, "model": model, "algorithm": algorithm, "settings": settings}


async def _judge(
    caller: "_ToolCaller", scene: Scene, env_id: str, models: Sequence[str]
) -> dict[str, Reply]:
    """Evaluate the models on held-out tasks, and compare each with the one before it.

    `models` are the base model, the one after SFT and the one after GRPO. Returns the replies of
    `compare_runs`, by the algorithm that they judge. Raises DemoFailed if a tool refuses or the
    evaluation fails.
    """
    base_model, sft_model, grpo_model = models
    evaluation = await caller.call(
        "evaluate", {"env_id": env_id, "models": list(models), "rows": EVALUATED_ROWS}
    )
    scene.runs.append(evaluation["run_id"])
    await caller.wait(evaluation["run_id"], metric="")  # an evaluation has no curve to draw
    sft_ids = {"ids": [base_model, sft_model], "env_id": env_id}
    grpo_ids = {"ids": [sft_model, grpo_model], "env_id": env_id}
    return {
        "sft": await caller.call("compare_runs", sft_ids),
        "grpo": await caller.call("compare_runs", grpo_ids),
    }


async def _train(caller: "_ToolCaller", scene: Scene, plan: Reply) -> Reply:
    """Submit a training run and wait for its end; returns its last status.

    `plan` holds the arguments of `submit_train` but its cap on hours.

    Raises:
        DemoFailed: the submit was refused, or the run did not end as done.
    """
    algorithm = plan["algorithm"]
    submit_reply = await caller.call(
        "submit_train", plan | {"max_gpu_hours": MAX_GPU_HOURS}, step_name=f"submit {algorithm}"
    )
    scene.runs.append(submit_reply["run_id"])
    return await caller.wait(submit_reply["run_id"], CURVES[algorithm])


class _ToolCaller:
    """Calls the server's tools and shows each call as a step on the screen."""

    def __init__(self, client: Client, stage: Stage) -> None:
        self._client = client
        self._stage = stage

    async def call(self, tool: str, arguments: Reply, step_name: str = "") -> Reply:
        """Call a tool as one step, named `step_name` or as the tool, and return its reply.

        Raises:
            DemoFailed: the tool refused.
        """
        step = self._stage.begin(step_name or tool)
        reply = await self._call_tool(tool, arguments)
        self._stage.end(step, str(reply["summary"]))
        return reply

    async def read(self, tool: str, arguments: Reply) -> None:
        """Call a tool whose result is a text, as one step, and show the first line of the text.

        Raises:
            DemoFailed: the tool refused.
        """
        step = self._stage.begin(tool)
        result = await self._client.call_tool(tool, arguments)
        text = _text_of(result)
        if result.is_error:
            raise DemoFailed(f"{tool}: {text}")
        first_line = text.strip().splitlines()[0]
        self._stage.end(step, first_line.lstrip("# "))  # without the marks of a heading

    async def wait(self, run_id: str, metric: str) -> Reply:
        """Wait until a run ends, without a time limit, and return its last status.

        Meanwhile its progress is shown, with the curve of `metric` unless that is "".

        Raises:
            DemoFailed: the run did not end as done, or a tool refused.
        """
        step = self._stage.begin("wait_run", run_id)
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
                break
        if reply["state"] != "done":
            self._stage.end(step, str(reply["summary"]), failed=True)
            raise DemoFailed(f"{run_id} {reply['state']}: {reply.get('error') or reply['summary']}")
        self._stage.end(step, ending(reply))
        return reply

    async def _draw(self, step: Step, reply: Reply, metric: str) -> None:
        """Show the progress of a run with the curve of `metric`.

        The latest values of `metric` and of the held-out success stand beside it, once there are
        any.
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

    async def _call_tool(self, tool: str, arguments: Reply) -> Reply:
        """Call a tool and return its reply. Raises DemoFailed with the text of its error."""
        result = await self._client.call_tool(tool, arguments)
        if result.is_error or result.structured_content is None:
            raise DemoFailed(f"{tool}: {_text_of(result)}")
        return result.structured_content


def _text_of(result: CallToolResult) -> str:
    """The text of a tool's result; parts of it that are no text are left out."""
    return "".join(getattr(part, "text", "") for part in result.content)


def ending(reply: Reply) -> str:
    """How a finished run went, such as "r-1  held-out success 0.310 -> 0.870  better".

    The numbers are those before and after training. A run without them, such as an evaluation, gets
    its summary.
    """
    result = reply.get("result") or {}
    evidence = result.get("evidence") or {}
    before = (evidence.get("before") or {}).get("value")
    after = (evidence.get("after") or {}).get("value")
    if before is None or after is None:
        return str(result.get("summary") or reply["summary"])
    verdict = str(reply.get("verdict", "")).replace("_", " ")
    metric = evidence.get("metric", "success")
    return f"{reply['run_id']}  held-out {metric} {before:.3f} -> {after:.3f}  {verdict}"


def column(logs: Mapping[str, Any], name: str) -> list[float]:
    """The numbers in the column `name` of a page of logs; [] if there is no such column.

    `logs` has `columns` (names) and `rows` (lists of cells). Cells that hold no number are left
    out.
    """
    columns: Sequence[str] = logs.get("columns") or []
    if name not in columns:
        return []
    index = list(columns).index(name)
    rows = logs.get("rows") or []
    values = [row[index] for row in rows if len(row) > index]
    return [float(value) for value in values if isinstance(value, int | float)]


def _is_better(facts: Reply) -> bool:
    """Whether the demo has shown that both runs made the model better.

    For SFT and for GRPO the verdict of the run and that of the comparison must be "better", and the
    interval of the comparison must lie above 0. `facts` is the field of `Scene`; what a demo that
    failed has not reached is missing there.
    """
    for algorithm in ("sft", "grpo"):
        run = facts.get("runs", {}).get(algorithm, {})
        comparison = facts.get("compared", {}).get(algorithm, {})
        low, _ = _interval(comparison)
        both_better = run.get("verdict") == "better" and comparison.get("verdict") == "better"
        if not (both_better and low > 0):
            return False
    return True


def _interval(comparison_reply: Reply) -> tuple[float, float]:
    """The (low, high) interval of the first comparison in a reply of `compare_runs`.

    It is (-infinity, infinity) if there is none.
    """
    comparisons = comparison_reply.get("comparisons") or [{}]
    low, high = comparisons[0].get("interval") or (-math.inf, math.inf)
    return low, high


def _show_result(console: Console, scene: Scene, is_better: bool) -> None:
    """Print the two verdicts, the answers of both models, the report's path and the time taken."""
    facts = scene.facts
    console.print()
    for name in ("sft", "grpo"):
        comparison = facts["compared"][name]
        verdict = str(comparison.get("verdict", "unknown"))
        line = Text(f"{name:<5}", style="bold")
        line.append(verdict.replace("_", " "), style=VERDICTS.get(verdict, ""))
        line.append(f"  {comparison['summary']}")
        console.print(line, soft_wrap=True)
    console.print()
    console.print(f"“{QUESTION}”", soft_wrap=True)
    console.print(_answers(facts["chat"]))
    console.print()
    if is_better:
        console.print(Text("Verdict: better", style="bold green"))
    else:
        console.print(Text("Verdict: not better", style="bold red"))
    console.print(f"Report:  {facts['report']}", soft_wrap=True)
    console.print(f"Time:    {duration(facts['seconds'])}")


def _answers(chat: Reply) -> Table:
    """The answers of a chat as a table, that of the model before training first."""
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    # The chat asked the trained model first.
    for answer in reversed(chat.get("answers") or []):
        table.add_row(str(answer.get("model", "")), str(answer.get("answer", "")).strip())
    return table


def _clean_up(scene: Scene, cancel_reason: str) -> None:
    """Stop what the demo has deployed, and cancel its runs unless `cancel_reason` is "".

    This calls the engine and not the server, because a Ctrl-C has ended the server too. Errors are
    printed on stderr.
    """
    runs_to_cancel = scene.runs if cancel_reason else []
    for run_id in runs_to_cancel:
        try:
            verbs.cancel_run(scene.home, run_id, cancel_reason)
        except UserError as error:
            sys.stderr.write(f"{run_id}: {clean(error.message)}\n")
    for model in scene.served:
        try:
            verbs.deploy(scene.home, model, "stop")
        except UserError as error:
            sys.stderr.write(f"{model}: {clean(error.message)}\n")
