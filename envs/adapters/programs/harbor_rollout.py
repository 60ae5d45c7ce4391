"""Plays one Harbor task: opens its sandbox, lets the model run commands in it, ends whatever those
have left, and only then brings the tests and runs them. Prints the reward as the last line.

Runs in a copy of the environment's folder, with the interpreter that has its packages.
"""

import importlib.util
import json
import math
import os
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _import_envs() -> None:
    """Make the package `envs` importable, and nothing else that lies beside it."""
    folder = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "envs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    package = importlib.util.module_from_spec(spec)
    sys.modules["envs"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _import_envs()

from envs.adapters.parts.harbor_task import (  # noqa: E402
    HarborTask,
    Options,
    TaskRefused,
    filled_in,
    read_task,
)
from envs.adapters.parts.options import read_options  # noqa: E402
from envs.config.settings import EnvSettings, read_settings  # noqa: E402
from envs.json_types import JsonObject  # noqa: E402
from envs.sandboxes import opening  # noqa: E402
from envs.sandboxes.contract import Order, Ran, Sandbox, SandboxFault  # noqa: E402

REWARD_TEXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
REWARD_BYTES = 64 << 10
OUTPUT_CHARS = 4000  # of a command's output, for the model
SPARE_S = 3.0  # of the rollout's time, to give the sandbox back
LIFETIME_SPARE_S = 60.0  # by which a sandbox may outlive a rollout that was killed
BLOCK = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)```", re.DOTALL)
SYSTEM = {
    "tool": "You work in a Linux sandbox, in {workdir}. Run commands with the tool bash. Answer "
    "without a call when the task is done.",
    "block": "You work in a Linux sandbox, in {workdir}. To run a command, write it in a block "
    "that begins with ```bash and ends with ```, one block in an answer; you are told what it "
    "printed. Answer without a block when the task is done.",
}
# Removes links of the agent that lead to where the tests will be, or to all folders at once.
SWEPT = "swept"
SWEEP_LINKS = (
    'find "$PWD" "$HOME" /tmp /var/tmp /logs -type l -exec bash -c \'for link; do '
    'case "$(readlink -m "$link")" in /|/tests|/tests/*|/solution|/solution/*|/logs|/logs/*) '
    'rm -f "$link";; esac; done\' sweep {} + 2>/dev/null; printf ' + SWEPT
)
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the sandbox; returns its exit status and its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


class RolloutFault(Exception):
    """The rollout says nothing about the model; the text says why."""


class Guard:
    """Gives the sandbox back when SIGTERM comes, in a thread of its own: the package of a cloud may
    keep the main thread in a call that no signal interrupts."""

    def __init__(self) -> None:
        """Begin to wait for the signal."""
        self._sandbox: Sandbox | None = None
        self._told = threading.Event()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)  # a byte at once, whatever the main thread does
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._wait, args=(reader,), daemon=True).start()

    def was_told(self) -> bool:
        """Whether the signal has come."""
        return self._told.is_set()

    def hold(self, sandbox: Sandbox) -> None:
        """Take charge of an open sandbox. Raises RolloutFault if the signal has come already."""
        self._sandbox = sandbox
        if self._told.is_set():
            raise RolloutFault("the rollout was ended while its sandbox was opened")

    def _wait(self, reader: int) -> None:
        """Wait for the signal, give the sandbox back and end this process."""
        while signal.SIGTERM not in os.read(reader, 1):
            continue
        self._told.set()
        if self._sandbox is not None:
            opening.close(self._sandbox)
            os._exit(1)


@dataclass
class Clock:
    """The times of a rollout, on the monotonic clock.

    Attributes:
        end: when the sandbox must be given back.
        agent_end: when the model's time is up.
    """

    end: float
    agent_end: float

    @property
    def left(self) -> float:
        """Seconds that the model has left, at least 0."""
        return max(0.0, self.agent_end - time.monotonic())


def main() -> None:
    """Play the rollout of the task in the file HONESMITH_TASK and print its reward as JSON. If
    something other than the model fails, exit with status 1 and say what."""
    guard = Guard()
    row = json.loads(Path(os.environ["HONESMITH_TASK"]).read_text("utf-8"))
    try:
        settings = read_settings(Path.cwd())
        assert settings.adapter is not None  # the table that names this format
        options = read_options(settings.adapter, Options)
        folder = Path.cwd() / row["metadata"]["folder"]
        task = read_task(folder, options.sandbox, settings.secrets)
        result = play(task, options, settings, guard)
    except (SandboxFault, TaskRefused, RolloutFault) as fault:
        sys.exit(f"{fault}")
    sys.stdout.write(json.dumps(result) + "\n")


def play(task: HarborTask, options: Options, settings: EnvSettings, guard: "Guard") -> JsonObject:
    """Play a task and return what to print: `reward`, `success` and `metrics`. `guard` gives the
    sandbox back where the rollout is ended.

    Raises SandboxFault if the sandbox fails, RolloutFault if the gateway or the tests do.
    """
    assert settings.rollout is not None  # the format has a program
    seconds = settings.rollout.seconds
    end = time.monotonic() + seconds - SPARE_S
    watch = opening.Watch(guard.was_told, guard.hold)
    with opening.opened(options.sandbox, _order(task, seconds), watch) as lease:
        sandbox = lease.sandbox
        clock = Clock(end, _agent_end(task, options, end))
        tests = list(task.files("tests"))  # read before anybody acts who could hide them
        for name, data in task.environment_files:
            sandbox.write(f"{sandbox.workdir}/{name}", data)
        commands = _let_act(sandbox, task, options, clock)
        scores = _graded(sandbox, task, tests, options, clock)
        lasted = lease.seconds
    metrics = {name: value for name, value in scores.items() if name != options.reward_key}
    metrics |= {"commands": float(commands), "sandbox_seconds": round(lasted, 3)}
    price = options.sandbox.get("price_per_hour")
    if price is not None:
        metrics["sandbox_cost"] = round(float(price) * lasted / 3600, 6)
    reward = scores[options.reward_key]
    return {"reward": reward, "success": reward >= options.success_reward, "metrics": metrics}


def _order(task: HarborTask, seconds: float) -> Order:
    """Return the sandbox that a task needs, for a rollout of so many seconds."""
    labels = {
        "honesmith-env": _label(os.environ.get("HONESMITH_ENV", "unknown")),
        "honesmith-task": _label(task.folder.name),
        # The rollout's key opens nothing once it is over; a part of it tells rollouts apart.
        "honesmith-rollout": os.urandom(6).hex(),
    }
    return Order(
        image=task.image,
        workdir=task.workdir,
        variables=filled_in(task.variables),
        cpus=task.cpus,
        memory_mb=task.memory_mb,
        disk_mb=task.disk_mb,
        network=task.network,
        lifetime_s=seconds + LIFETIME_SPARE_S,
        labels=labels,
    )


def _label(text: str) -> str:
    """Return a text in the letters that labels may have everywhere."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:60]


def _agent_end(task: HarborTask, options: Options, end: float) -> float:
    """Return when the model's time is up: by the rollout's end less the time for the tests, by the
    option and by the task's own limit."""
    limits = [end - _verifier_seconds(task, options)]
    for seconds in (options.agent_seconds, task.agent_seconds):
        if seconds:
            limits.append(time.monotonic() + seconds)
    return min(limits)


def _verifier_seconds(task: HarborTask, options: Options) -> float:
    """Return the time limit of the tests: that of the options, or the task's where it is less."""
    return min(options.verifier_seconds, task.verifier_seconds or options.verifier_seconds)


# --- the agent -----------------------------------------------------------------------------


def _let_act(sandbox: Sandbox, task: HarborTask, options: Options, clock: Clock) -> int:
    """Let whoever the options name work on the task. Returns how many commands were run."""
    if options.agent == "model":
        return _let_model_act(sandbox, task, options, clock)
    # A rollout is one that has asked; the answer is not used.
    _ask({"messages": [{"role": "user", "content": task.instruction}], "max_tokens": 1}, clock)
    if options.agent == "none":
        return 0
    for name, data in task.files("solution"):
        sandbox.write(f"/solution/{name}", data)
    sandbox.exec("bash /solution/solve.sh", clock.left, {}, grading=True)
    return 1


def _let_model_act(sandbox: Sandbox, task: HarborTask, options: Options, clock: Clock) -> int:
    """Ask the model for commands until it gives none or a limit is reached. Returns how many were
    run."""
    system = options.instructions or SYSTEM[options.calls].format(workdir=sandbox.workdir)
    messages: list[Any] = [
        {"role": "system", "content": system},
        {"role": "user", "content": task.instruction},
    ]
    tools = [TOOL] if options.calls == "tool" else []
    ran = 0

    def run(command: str | None) -> str:
        """Run one command and return what the model is told."""
        nonlocal ran
        ran += 1
        if command is None:
            return 'bash takes {"command": "..."} with a text.'
        seconds = min(options.command_seconds, clock.left)
        return _told(sandbox.exec(command, max(0.1, seconds), {}, grading=False), seconds)

    while clock.left > 0:
        question: JsonObject = {"messages": messages}
        if tools:
            question["tools"] = tools
        message = _ask(question, clock, may_end=len(messages) > 2)
        if message is None:
            break
        read_replies = _replies_to_calls if tools else _replies_to_blocks
        replies = read_replies(message, run, options.commands - ran)
        messages += [message, *replies]
        if not replies or ran >= options.commands:
            break
    return ran


def _replies_to_calls(
    message: JsonObject, run: Callable[[str | None], str], most: int
) -> list[Any]:
    """Run the commands of a message's tool calls, at most so many; return the messages that
    answer."""
    replies = []
    for call in (message.get("tool_calls") or [])[:most]:
        command = None
        try:
            command = json.loads(call["function"]["arguments"])["command"]
        except (ValueError, LookupError, TypeError):
            command = None
        text = run(command if isinstance(command, str) else None)
        replies.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": text})
    return replies


def _replies_to_blocks(
    message: JsonObject, run: Callable[[str | None], str], most: int
) -> list[Any]:
    """Run the command in the first block of a message; return the message that answers, if there
    was one."""
    match = BLOCK.search(str(message.get("content") or ""))
    if match is None or most <= 0:
        return []
    return [{"role": "user", "content": run(match[1])}]


def _told(ran: Ran, seconds: float) -> str:
    """Return what the model is told of a command: its exit status and what it wrote, cut."""
    output = ran.stdout + (f"\n{ran.stderr}" if ran.stderr.strip() else "")
    if len(output) > OUTPUT_CHARS:
        half = OUTPUT_CHARS // 2
        note = f"\n... {len(output) - OUTPUT_CHARS} characters are left out ...\n"
        output = output[:half] + note + output[-half:]
    end = f"ended after {seconds:.0f} s" if ran.timed_out else f"exit status {ran.status}"
    return f"{end}\n{output}".strip()


def _ask(question: JsonObject, clock: Clock, may_end: bool = False) -> Any:
    """Ask the model, and return its message.

    Returns None if the gateway takes no more of this rollout, or the model's time is up, where that
    may be (`may_end`). Raises RolloutFault for any other failure.
    """
    url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], **question}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=max(1.0, clock.left)) as reply:
            return json.loads(reply.read())["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if may_end and error.code == 400:  # max_turns or max_length is reached
            return None
        raise RolloutFault(f"the gateway answered {error.code}: {error.read(300)!r}") from error
    except TimeoutError as error:
        if may_end:
            return None
        raise RolloutFault("the model's time was up before its first answer") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RolloutFault(f"the gateway gave no answer: {error}") from error


# --- the tests -----------------------------------------------------------------------------


def _graded(
    sandbox: Sandbox,
    task: HarborTask,
    tests: Sequence[tuple[str, bytes]],
    options: Options,
    clock: Clock,
) -> Mapping[str, float]:
    """Run the task's tests on what the agent has left; return the rewards by name.

    Before the tests come, every process of the agent is dead, and whatever lies in the place of the
    reward is gone, as are links that would lead to the tests; before the reward is read, so are the
    processes that the tests have left. `tests` are their files: (path below /tests, content).
    """
    sandbox.end_processes()
    swept = sandbox.exec(SWEEP_LINKS, max(0.1, clock.end - time.monotonic()), {}, grading=True)
    if not swept.stdout.endswith(SWEPT):
        raise RolloutFault(
            f"links to the tests cannot be looked for: {swept.stderr.strip()[-300:]}"
        )
    for path in ("/logs/verifier", "/tests", "/solution"):
        sandbox.remove(path)
    sandbox.write("/logs/verifier/.keep", b"")  # makes the folder
    for name, data in tests:
        sandbox.write(f"/tests/{name}", data)
    seconds = min(_verifier_seconds(task, options), max(0.1, clock.end - time.monotonic()))
    variables = filled_in(task.verifier_variables)
    ran = sandbox.exec("bash /tests/test.sh", seconds, variables, grading=True)
    sandbox.end_processes()
    if ran.timed_out:
        raise RolloutFault(f"the tests took longer than {seconds:.0f} s (verifier_seconds)")
    if ran.status > 128:  # by what the agent wrote, which they ran
        raise RolloutFault(f"the tests were ended by signal {ran.status - 128}")
    scores = read_rewards(sandbox)
    output = (ran.stdout + ran.stderr).strip()[-300:]
    if scores is None:
        text = f"the tests wrote no {REWARD_TEXT} and no {REWARD_JSON}"
        raise RolloutFault(f"{text} (exit status {ran.status}): {output}")
    if options.reward_key not in scores:
        names = ", ".join(sorted(scores)) or "nothing"
        raise RolloutFault(f"reward.json has {names}, not {options.reward_key} (reward_key)")
    return scores


def read_rewards(sandbox: Sandbox) -> dict[str, float] | None:
    """Return the rewards by name that the tests have written: reward.json, or else the number in
    reward.txt as "reward"; None if there is neither. Raises RolloutFault for anything else."""
    data = sandbox.read(REWARD_JSON, REWARD_BYTES)
    if data is not None:
        value = _json_of(data, REWARD_JSON)
        if not isinstance(value, dict) or not all(_is_number(each) for each in value.values()):
            raise RolloutFault(f"{REWARD_JSON} is no object of finite numbers")
        return {name: float(number) for name, number in value.items()}
    data = sandbox.read(REWARD_TEXT, REWARD_BYTES)
    if data is None:
        return None
    try:
        number = float(data.decode("utf-8").strip())
    except ValueError as error:  # not UTF-8, or no number
        raise RolloutFault(f"{REWARD_TEXT} is no number") from error
    if not math.isfinite(number):
        raise RolloutFault(f"{REWARD_TEXT} is no finite number")
    return {"reward": number}


def _json_of(data: bytes, path: str) -> Any:
    """Return the JSON value in a file's content. Raises RolloutFault for anything else."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RolloutFault(f"{path} is no JSON") from error


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


if __name__ == "__main__":
    main()
