"""A conversation in a real terminal: a pseudo-terminal, the command, a deployment's stand-in."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_ins import stand_in

from engine.home.run_dir import Home
from engine.machine.processes import deployments

DEADLINE_S = 40.0  # starts of python on busy cores


@pytest.fixture
def served(home: Home, monkeypatch: pytest.MonkeyPatch):
    """`honesmith chat` asks a stand-in, which repeats what it was sent."""
    stand_in(monkeypatch, server=Path(__file__).parents[2] / "engine" / "fake_server.py")
    stand_in(monkeypatch, trainer=Path(__file__).parents[2] / "engine" / "fake_trainer.py")
    yield
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")


class Terminal:
    """A command on a pseudo-terminal, which a test types into and reads."""

    def __init__(self, *argv: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "mcp_server.cli", *argv]
        environment = os.environ | {"TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str) -> str:
        """What is shown from now on, up to `text`."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} is missing in {self.shown!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the command has ended
                    self.shown += os.read(self.master, 4096).decode().replace("\r\n", "\n")
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")
        self.until(line + "\n")  # the terminal's echo


@pytest.mark.timeout(60)
def test_a_conversation_keeps_its_history_until_it_is_reset(home: Home, served: None):
    terminal = Terminal("chat", "pebble", "--system", "Be brief.")
    terminal.until("> ")
    terminal.type("one")
    assert terminal.until("\n") == "pebble heard Be brief. one"
    terminal.until("> ")
    terminal.type("two")
    assert terminal.until("\n") == "pebble heard Be brief. one pebble heard Be brief. one two"
    terminal.until("> ")
    terminal.type("/reset")
    terminal.until("> ")
    terminal.type("three")
    assert terminal.until("\n") == "pebble heard Be brief. three"
    terminal.until("> ")
    terminal.type("/system Be loud.")
    terminal.until("> ")
    terminal.type("four")
    assert terminal.until("\n") == "pebble heard Be loud. four"
    terminal.until("> ")
    terminal.type("/nonsense")
    assert terminal.until("\n").startswith("/nonsense is no command")
    terminal.until("> ")
    os.write(terminal.master, b"\x04")  # Ctrl-D
    assert terminal.process.wait(20) == 0
    os.close(terminal.master)


@pytest.mark.timeout(60)
def test_a_cut_answer_goes_on_at_an_empty_line_and_an_error_ends_nothing(home: Home, served: None):
    terminal = Terminal("chat", "pebble", "--max-tokens", "1")
    terminal.until("> ")
    terminal.type("one")
    assert terminal.until("\n") == "pebble heard one"
    assert "cut at 5 tokens" in terminal.until("(an empty line goes on)\n")
    terminal.until("> ")
    terminal.type("")
    assert terminal.until("\n") == " and after 5 more"
    terminal.until("> ")
    terminal.type("die")
    assert "DEPLOY_FAILED" in terminal.until("> ")
    terminal.type("/quit")
    assert terminal.process.wait(20) == 0
    os.close(terminal.master)


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_ctrl_c_ends_an_answer_and_not_the_conversation(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    stand_in(monkeypatch, server=Path(__file__).parents[2] / "helpers" / "gated_server.py")
    allowed = home.root / "tokens"
    allowed.write_text("1")
    terminal = Terminal("chat", "pebble")
    try:
        terminal.until("> ")
        terminal.type("What is 3 + 4?")
        terminal.until("7")  # its first token; the second is never allowed
        terminal.process.send_signal(signal.SIGINT)  # as the terminal does at Ctrl-C
        terminal.until("(stopped; the question is forgotten)\n")
        terminal.until("> ")
        allowed.write_text("100000")
        terminal.type("What is 3 + 4?")
        terminal.until("7\n")
        terminal.until("> ")
        terminal.type("/quit")
        assert terminal.process.wait(20) == 0
    finally:
        os.close(terminal.master)
        for row in deployments.living(home):
            deployments.stop(home, row, "the test is over")


@pytest.mark.timeout(60)
def test_one_question_on_a_terminal_shows_the_answer_as_it_comes(home: Home, served: None):
    terminal = Terminal("chat", "pebble", "hello")
    assert terminal.until("\n") == "pebble heard hello"
    assert "pebble answered in" in terminal.until("conversation: c-")
    assert terminal.process.wait(20) == 0
    os.close(terminal.master)


@pytest.mark.timeout(60)
def test_a_question_in_a_pipe_is_asked(home: Home, served: None):
    argv = [sys.executable, "-m", "mcp_server.cli", "chat", "pebble"]
    done = subprocess.run(argv, input="hello", capture_output=True, text=True, timeout=40)
    assert done.returncode == 0 and "pebble heard hello" in done.stdout
