"""What the ssh program is told, and what its words mean; a script stands in its place."""

import os
import sys
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.executors.ssh import HERE, HostLost, HostRefused, Link, check_destination


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the script that is `ssh`."""

    def write(body: str) -> None:
        script = tmp_path / "bin" / "ssh"
        script.parent.mkdir(exist_ok=True)
        script.write_text("#!/bin/sh\n" + body)
        script.chmod(0o700)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return write


def test_what_the_other_side_prints_first_is_passed_over(ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("HONESMITH_TOKEN_OF_OURS", "x")
    ssh(
        f'echo "$@" > {tmp_path}/argv\nenv > {tmp_path}/env\necho "Welcome to box!"\n'
        f'for last; do :; done\nexport HOME={tmp_path}\nexec sh -c "$last"\n'
    )
    with Link("box", "there") as link:
        assert link.facts["root"] == str(tmp_path / "there")
        with pytest.raises(Exception, match="does not lie below"):
            link.call("read", path="../x", offset=0, length=1)
        assert link.call("exist", folders=["x"])[0]["there"] == [False]
    argv = (tmp_path / "argv").read_text()
    for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "ForwardAgent=no"):
        assert f"-o {option} " in argv
    assert "HONESMITH_TOKEN_OF_OURS" not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "host key is another", "keygen"),
        ("Host key verification failed.", "not known here", "Connect once"),
        ("me@box: Permission denied (publickey).", "let this user in", "BatchMode"),
        ("/x/config: line 1: Bad configuration option: foo", "ssh config", "mend"),
    ],
)
def test_what_a_person_has_to_mend_is_said_with_the_next_move(ssh, words, message, hint):
    ssh(f"echo '{words}' >&2\nexit 255\n")
    with pytest.raises(HostRefused, match=message) as error:
        Link("box", "there")
    assert hint in error.value.hint


def test_a_host_without_python_is_refused(ssh):
    ssh("echo 'sh: python3: not found' >&2\nexit 127\n")
    with pytest.raises(HostRefused, match="has no python3"):
        Link("box", "there")


@pytest.mark.parametrize("body", ["echo 'Connection refused' >&2\nexit 255\n", "exit 0\n"])
def test_a_host_that_is_not_reached_is_lost_which_is_no_refusal(ssh, body):
    ssh(body)
    with pytest.raises(HostLost):
        Link("box", "there")


def test_words_of_the_other_side_bring_no_escape_sequences(ssh):
    ssh("printf 'no route\\033[2J\\n' >&2\nexit 255\n")
    with pytest.raises(HostLost) as error:
        Link("box", "there")
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "", "a b", "a;b", "$(x)", "a\nb"])
def test_a_destination_is_never_an_option_or_a_command(name):
    with pytest.raises(UserError):
        check_destination(name)


@pytest.mark.parametrize("python", ["py thon", "python3; rm", "-c", "$(x)", "'"])
def test_an_interpreter_is_never_a_command_of_a_shell(ssh, python):
    ssh("exit 0\n")
    with pytest.raises(UserError):
        Link("box", "there", python)


def test_this_machine_itself_is_a_place_without_ssh(ssh, tmp_path):
    ssh("exit 255\n")
    with Link(HERE, str(tmp_path / "shared"), sys.executable) as link:
        assert link.facts["root"] == str(tmp_path / "shared")
        link.call("write", b"x", path="a/b")
    assert (tmp_path / "shared/a/b").read_bytes() == b"x"
