"""The client of a command: a program that plays one task in a sandbox, under a time limit.

Everything that the program started is dead before its reward is read. A program that fails costs
only its own rollout: the score then says what happened as its `error`.
"""

import contextlib
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.config.settings import Limits, Rollout, read_settings
from envs.host.launch import Program
from envs.host.pipe import Fault, Pipe, reach_of
from envs.host.process import checked_score, failed_score
from envs.isolation.packages import packages_of
from envs.isolation.sandbox import LIMITS, OPEN_NETWORK, Sandbox
from envs.json_types import JsonObject, ScoreReply, TaskRow
from envs.metering.reward_server import NoReward, ask_reward

SUCCEEDED, FAILED = 0, 1  # exit statuses; any other means that the program did not work
KEPT_BYTES = 1 << 20  # how much of the end of the program's output is kept
HELLO_BYTES = 16 << 10  # of the beginning of the output, where the parent tells of the isolation
END_SECONDS = 10.0  # the parent's time to kill everything once the program's time is up
GRACE_SECONDS = 3.0  # of those, for a program that has rented a sandbox to give it back
START_SECONDS = 30.0  # time to prepare the sandbox; a busy machine takes long
OUTPUT_CHARS = 64_000  # how much of the end of its output a reward server is told
SHOWN_CHARS = 300  # how much of the last output a message shows


@dataclass(frozen=True)
class Commands:
    """The command of one environment, which is run once for each rollout.

    Args:
        source: the environment's folder.
        rollout: the settings of the command in environment.toml.
        python: an interpreter with the environment's packages; its folder comes first on PATH.
        limits: the resources each run may use.
        secrets: names and values of environment variables that only the command gets.
        log: the file to which its standard error is appended.
        sandbox: the isolation that must hold.
    """

    source: Path
    rollout: Rollout
    python: str
    limits: Limits
    secrets: Mapping[str, str]
    log: Path | None
    sandbox: Sandbox

    def start(self) -> "CommandRun":
        """Prepare the sandbox for one run; the program itself starts with `CommandRun.begin`.

        Raises EnvProblem or Fault if the sandbox cannot be made.
        """
        return CommandRun(self)


@dataclass(frozen=True)
class Ending:
    """How a run of a command ended.

    Attributes:
        code: the exit status of the program.
        signal: the signal that killed it, 0 for none.
        output: the end of its standard output.
        reward_file: if the reward is read from a file, its {"text"}, or a {"fault"}; else None.
        tail: the end of its standard error.
        open_network: whether it could reach, or listen on, more than its gateway.
        fault: why this run says nothing about the task: the program was not started, or some of its
            processes may still live. "" if there is no such reason.
        timed_out: whether its time was up.
    """

    code: int = 0
    signal: int = 0
    output: str = ""
    reward_file: JsonObject | None = None
    tail: str = ""
    open_network: bool = False
    fault: str = ""
    timed_out: bool = False


class CommandRun(Pipe):
    """One sandbox with one program. `close` must be called in any case.

    Attributes:
        listener: a listening socket that only the program can reach, at `base_url`.
    """

    def __init__(self, commands: Commands) -> None:
        """Start the sandbox and receive the socket on which the program will ask the model.

        Raises EnvProblem or Fault if that fails.
        """
        self.commands = commands
        rollout = commands.rollout
        # A secret that the program does not know, so that it cannot imitate the parent's messages.
        self._seal = secrets.token_hex(16)
        self._output_start = b""  # begins with the parent's message about the isolation
        own_end, parent_end = socket.socketpair()
        program = Program(
            command=rollout.command,
            reward_file=rollout.reward_file if rollout.reward == "file" else "",
            gateway=parent_end.detach(),
            seal=self._seal,
            grace_s=GRACE_SECONDS if _rents(commands.source) else 0.0,
        )
        super().__init__(
            commands.source,
            packages=packages_of(commands.python),
            limits=commands.limits,
            secrets=commands.secrets,
            log=commands.log,
            sandbox=commands.sandbox,
            order=program,
            reach=reach_of(commands.source),
        )
        with own_end:
            self.listener = self._receive_listener(own_end)

    @property
    def base_url(self) -> str:
        """The URL at which the program reaches `listener`."""
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def begin(self, task: TaskRow, variables: Mapping[str, str]) -> None:
        """Let the program start. It gets the task as a file, and these environment variables."""
        order = json.dumps({"task": task, "variables": dict(variables)}) + "\n"
        os.set_blocking(self.requests, True)
        with contextlib.suppress(BrokenPipeError):  # `wait` then says how the sandbox ended
            unwritten = memoryview(order.encode())
            while unwritten:
                written_count = os.write(self.requests, unwritten)
                unwritten = unwritten[written_count:]

    def wait(self) -> Ending:
        """Wait for the program to end, at most for its time limit, and return how it ended.

        At that point everything that it started is dead, and its output and reward file are read.
        """
        seconds = self.commands.rollout.seconds
        output, at_end = self._read_until(time.monotonic() + seconds, b"")
        if not at_end:
            self.close_lifeline()  # the parent then kills everything, and its output ends
            self._read_until(time.monotonic() + END_SECONDS, output)
            return Ending(fault=f"the command ran longer than {seconds:g} s", timed_out=True)
        return self._ending(output, at_end)

    def _receive_listener(self, gateway: socket.socket) -> socket.socket:
        """Return the listening socket that the parent hands over through the socket `gateway`.

        Raises Fault, with this run closed, if none comes within START_SECONDS.
        """
        gateway.settimeout(START_SECONDS)
        descriptors: list[int] = []
        with contextlib.suppress(OSError):  # closed, or nothing in time
            _, descriptors, _, _ = socket.recv_fds(gateway, 1, 1)
        if not descriptors:
            message = self._lost_message("the start of the command")
            self.close()
            raise Fault(message)
        return socket.socket(fileno=descriptors[0])

    def _read_until(self, deadline: float, output: bytes) -> tuple[bytes, bool]:
        """Append to `output` what the program prints until it ends or the deadline (on the
        monotonic clock) passes.

        Returns the last KEPT_BYTES of the output, and whether the end was reached.
        """
        poller = select.poll()
        poller.register(self.replies, select.POLLIN)
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return output, False
            if poller.poll(max(1.0, remaining_s * 1000)):  # milliseconds
                data = os.read(self.replies, 1 << 16)
                if not data:
                    return output, True
                self._output_start += data[: HELLO_BYTES - len(self._output_start)]
                output = (output + data)[-KEPT_BYTES:]

    def _ending(self, output: bytes, at_end: bool) -> Ending:
        """Return how the run ended, from what came out of the sandbox (`output`).

        The first and the last line are messages of the parent, what is between them was printed by
        the program. `at_end` is whether the output is complete.
        """
        earlier_lines, _, last_line = output.rstrip(b"\n").rpartition(b"\n")
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):  # no message of the parent
            message = json.loads(last_line)
        ending = message.get("exit") if isinstance(message, dict) else None
        if not at_end or not isinstance(ending, dict) or ending.get("seal") != self._seal:
            return Ending(fault=self._lost_message("the command"))
        _first_line, _, printed = earlier_lines.partition(b"\n")
        text = printed.decode("utf-8", "replace")
        tail = self.secrets.in_text(str(ending.get("tail") or ""))
        fault = ""
        if not ending["started"]:
            fault = f"the command was not started: {(text or tail).strip()[-SHOWN_CHARS:]}"
        elif not ending["all_dead"]:
            fault = "something that the command started could not be ended"
        return Ending(
            code=ending["code"],
            signal=ending["signal"],
            output=text,
            reward_file=ending.get("reward_file"),
            tail=tail,
            open_network=_has_open_network(self._output_start),
            fault=fault,
        )

    def close(self) -> None:
        """End everything in the sandbox and remove its folder."""
        with contextlib.suppress(AttributeError):  # the start failed before there was a listener
            self.listener.close()
        super().close()


def _rents(source: Path) -> bool:
    """Whether the command of a folder rents something that it should give back when it is ended.
    Raises EnvProblem if environment.toml cannot be read."""
    adapter = read_settings(source).adapter
    return adapter is not None and adapter.rents


def _has_open_network(output_start: bytes) -> bool:
    """Whether a program could reach more of the network than its gateway, as the first line of its
    output tells; True if it does not tell. The parent writes that line before the program starts.
    """
    first_line, _, _ = output_start.partition(b"\n")
    try:
        hello = json.loads(first_line)["hello"]
        return hello["level"] == LIMITS or OPEN_NETWORK in hello["gaps"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return True


def score_of(rollout: Rollout, ending: Ending, played: JsonObject | None = None) -> ScoreReply:
    """Return the score of a rollout, given how its command ended.

    The reward is read from where `rollout.reward` says: the exit status, a server, a file, or the
    last line of the output. If the ending says nothing about the task, the result is a failed score
    with the reason. `played` is what a reward server is told of the rollout: `task` and `messages`.
    """
    if ending.fault:
        return failed_score(ending.fault, timed_out=ending.timed_out)
    if ending.signal:
        return failed_score(_with_tail(f"the command was killed by signal {ending.signal}", ending))
    if rollout.reward == "exit":
        return _score_of_status(ending)
    if ending.code:
        return failed_score(_with_tail(f"the command left with exit status {ending.code}", ending))
    if rollout.reward == "http":
        return _score_of_server(rollout, ending, played)
    if rollout.reward == "file":
        # {"text": its content} or {"fault": why it could not be read}
        file_result = ending.reward_file or {"fault": "its reward file was not read"}
        if "fault" in file_result:
            return failed_score(_with_tail(str(file_result["fault"]), ending))
        return _score_of_text(str(file_result["text"]), place=rollout.reward_file)
    lines = ending.output.strip().splitlines()
    if not lines:
        return failed_score(_with_tail("the command printed nothing", ending))
    return _score_of_text(lines[-1], place="the last line of its output")


def _score_of_server(rollout: Rollout, ending: Ending, played: JsonObject | None) -> ScoreReply:
    """Ask the reward server once what a rollout earned, and return its score; a failed score if it
    gives none.

    It is not asked about a program that could have answered in its place, nor about one that asked
    the model nothing (`played` is None). No process of the rollout lives any more.
    """
    if played is None:
        return failed_score("the command asked the model nothing")
    if ending.open_network:
        return failed_score(
            "the reward server is not asked: here the program is not kept off the network, and "
            "could answer in the server's place (`honesmith doctor` says what this machine lacks)"
        )
    question = {**played, "output": ending.output[-OUTPUT_CHARS:]}
    try:
        text = ask_reward(rollout.reward_url, question, rollout.reward_seconds)
    except NoReward as failure:
        return failed_score(str(failure), timed_out=failure.timed_out)
    return _score_of_text(text, place=f"the reply of {rollout.reward_url}")


def _score_of_status(ending: Ending) -> ScoreReply:
    """Return the score for a command's exit status: the reward 1 for the status 0, the reward 0 for
    1, a failed score for any other."""
    if ending.code not in (SUCCEEDED, FAILED):
        text = f"the command left with exit status {ending.code}; 0 is success and 1 failure"
        return failed_score(_with_tail(text, ending))
    solved = ending.code == SUCCEEDED
    return {"reward": float(solved), "success": solved, "metrics": {}, "error": None}


def _score_of_text(text: str, place: str) -> ScoreReply:
    """Return the score that a command wrote as JSON: a number, or an object with `reward` and,
    optionally, `success`, `metrics` and `error`.

    Text of another form gives a failed score; `place` says in its message where the text came from.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return failed_score(f"{place} is no JSON: {text.strip()[:SHOWN_CHARS]!r}")
    if not isinstance(value, dict):
        value = {"reward": value}
    unknown = sorted(set(value) - {"reward", "success", "metrics", "error"})
    if unknown:
        return failed_score(f"{place} has the unknown key {unknown[0][:SHOWN_CHARS]!r}")
    try:
        return checked_score({"metrics": {}, **value})
    except Fault as fault:
        return failed_score(f"{place}: {fault}")


def _with_tail(text: str, ending: Ending) -> str:
    """Return `text`, followed by the last output of the command if there is any: the end of its
    standard error, or else of its standard output."""
    last_output = (ending.tail or ending.output).strip()[-SHOWN_CHARS:]
    return f"{text}; its last output: {last_output}" if last_output else text
