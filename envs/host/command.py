"""The client of a command: one program plays one task, in a box of its own, under a time limit.

Everything that the program started is dead before its reward is read. Whatever it does costs its
own rollout alone: the score then says what happened as its `error`.
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

from envs.config.settings import Limits, Rollout
from envs.host.launch import Program
from envs.host.pipe import Fault, Pipe, reach_of
from envs.host.process import checked_score, failed_score
from envs.isolation.packages import packages_of
from envs.isolation.sandbox import Sandbox
from envs.json_types import JsonObject, ScoreReply, TaskRow

SUCCEEDED, FAILED = 0, 1  # exit statuses; any other says that the program did not work
KEPT_BYTES = 1 << 20  # of the end of its output
END_SECONDS = 10.0  # for the parent to end everything once the time is up
START_SECONDS = 30.0  # for the box to be ready; a busy machine takes long
SHOWN_CHARS = 300  # of its last output, in a message


@dataclass(frozen=True)
class Commands:
    """The command of one environment, to be run once for each rollout.

    Args:
        source: the environment's folder.
        rollout: what environment.toml says of the command.
        python: the interpreter that comes first on its PATH, with the environment's packages.
        limits: what each run may use.
        secrets: names and values that only the command gets to see.
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
        """A box for one run; the program starts with `begin`.

        Raises EnvProblem or Fault if the box cannot be made.
        """
        return CommandRun(self)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        code: exit status of the program.
        signal: what killed it, 0 for none.
        output: the end of its standard output.
        reward_file: {"text"} or {"fault"} where its reward is read from a file.
        tail: the end of its standard error.
        fault: why it says nothing about the task: it was not started, or something of it may live.
        timed_out: whether its time was up.
    """

    code: int = 0
    signal: int = 0
    output: str = ""
    reward_file: JsonObject | None = None
    tail: str = ""
    fault: str = ""
    timed_out: bool = False


class CommandRun(Pipe):
    """One box with one program. `close` must be called, whatever happened.

    Attributes:
        listener: a listening socket which the program alone can reach, by `base_url`.
    """

    def __init__(self, commands: Commands) -> None:
        """Start the box; see `Commands.start`."""
        self.commands = commands
        rollout = commands.rollout
        self._seal = secrets.token_hex(16)
        ours, theirs = socket.socketpair()
        order = Program(
            rollout.command,
            rollout.reward_file if rollout.reward == "file" else "",
            theirs.detach(),
            self._seal,
        )
        super().__init__(
            commands.source,
            packages_of(commands.python),
            commands.limits,
            commands.secrets,
            commands.log,
            commands.sandbox,
            order,
            reach_of(commands.source),
        )
        with ours:
            self.listener = self._receive_listener(ours)

    @property
    def base_url(self) -> str:
        """Where the program reaches `listener`."""
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def begin(self, task: TaskRow, variables: Mapping[str, str]) -> None:
        """Let the program start: it gets the task as a file and the variables."""
        order = json.dumps({"task": task, "variables": dict(variables)}) + "\n"
        os.set_blocking(self.requests, True)
        with contextlib.suppress(BrokenPipeError):  # `wait` then says how the box ended
            unwritten = memoryview(order.encode())
            while unwritten:
                unwritten = unwritten[os.write(self.requests, unwritten) :]

    def wait(self) -> Ending:
        """Wait for the program to end, at most as long as it may run; then everything that it
        started is dead, and its output and its reward file are read."""
        seconds = self.commands.rollout.seconds
        output, at_end = self._read_until(time.monotonic() + seconds, b"")
        timed_out = not at_end
        if timed_out:
            self.close_lifeline()
            output, at_end = self._read_until(time.monotonic() + END_SECONDS, output)
        if timed_out:
            return Ending(fault=f"the command ran longer than {seconds:g} s", timed_out=True)
        return self._ending(output, at_end)

    def _receive_listener(self, gateway: socket.socket) -> socket.socket:
        """The listening socket that the parent hands over. Raises Fault if none comes."""
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
        """Append to `output` what comes until the end or the deadline, and keep its last
        KEPT_BYTES. Returns it, and whether the end was reached."""
        poller = select.poll()
        poller.register(self.replies, select.POLLIN)
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return output, False
            if poller.poll(max(1.0, remaining_s * 1000)):
                data = os.read(self.replies, 1 << 16)
                if not data:
                    return output, True
                output = (output + data)[-KEPT_BYTES:]

    def _ending(self, output: bytes, at_end: bool) -> Ending:
        """What the output of the box says of the end; its last line is the parent's."""
        printed, _, last = output.rstrip(b"\n").rpartition(b"\n")
        message: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(last)
        ending = message.get("exit") if isinstance(message, dict) else None
        if not at_end or not isinstance(ending, dict) or ending.get("seal") != self._seal:
            return Ending(fault=self._lost_message("the command"))
        # The first line of the output is the parent's too, about the isolation.
        text = printed.partition(b"\n")[2].decode("utf-8", "replace")
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
            fault=fault,
        )

    def close(self) -> None:
        """End everything in the box and remove its folder."""
        with contextlib.suppress(AttributeError):  # closed before it came
            self.listener.close()
        super().close()


def score_of(rollout: Rollout, ending: Ending) -> ScoreReply:
    """The score of a rollout from how its command ended; a failed score with the reason where it
    says nothing about the task."""
    if ending.fault:
        return failed_score(ending.fault, timed_out=ending.timed_out)
    if ending.signal:
        return failed_score(_with_tail(f"the command was killed by signal {ending.signal}", ending))
    if rollout.reward == "exit":
        return _score_of_status(ending)
    if ending.code:
        return failed_score(_with_tail(f"the command left with exit status {ending.code}", ending))
    if rollout.reward == "file":
        read = ending.reward_file or {"fault": "its reward file was not read"}
        if "fault" in read:
            return failed_score(_with_tail(str(read["fault"]), ending))
        return _score_of_text(str(read["text"]), rollout.reward_file)
    lines = ending.output.strip().splitlines()
    if not lines:
        return failed_score(_with_tail("the command printed nothing", ending))
    return _score_of_text(lines[-1], "the last line of its output")


def _score_of_status(ending: Ending) -> ScoreReply:
    """The score that an exit status stands for: 1 for success, 0 for failure."""
    if ending.code not in (SUCCEEDED, FAILED):
        text = f"the command left with exit status {ending.code}; 0 is success and 1 failure"
        return failed_score(_with_tail(text, ending))
    solved = ending.code == SUCCEEDED
    return {"reward": float(solved), "success": solved, "metrics": {}, "error": None}


def _score_of_text(text: str, place: str) -> ScoreReply:
    """The score that a command wrote as JSON: a number, or an object with `reward`, and `success`
    and `metrics` where it likes. `place` says where it stood, for messages."""
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
    """The text, followed by the last output of the command where there is any."""
    last = (ending.tail or ending.output).strip()[-SHOWN_CHARS:]
    return f"{text}; its last output: {last}" if last else text
