"""A stdio server ends when the program that started it is gone; its runs do not."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from engine.home.run_dir import Home
from mcp_server.protocol.parent_watch import watch_parent

DEADLINE_S = 20.0


def gone(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_parent_that_lives_is_watched_in_peace():
    died = threading.Event()
    watch_parent(every_s=0.01, on_death=died.set)
    assert not died.wait(0.1)


def test_another_parent_than_expected_ends_the_watch():
    died = threading.Event()
    watch_parent(parent=-1, every_s=0.01, on_death=died.set)
    assert died.wait(2)


# Starts a server whose stdin this test holds open, says its process id, waits to be killed.
HOST = """
import os, subprocess, sys, time
server = subprocess.Popen(
    [sys.executable, "-m", "mcp_server.cli", "serve", "--home", sys.argv[1], "--root", sys.argv[1]],
    stdin=int(sys.argv[2]), stdout=int(sys.argv[3]), pass_fds=(int(sys.argv[2]), int(sys.argv[3])),
)
print(server.pid, flush=True)
time.sleep(60)
"""
INITIALIZE = (
    b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18",'
    b'"capabilities":{},"clientInfo":{"name":"t","version":"1"}}}\n'
)


@pytest.mark.timeout(60)
def test_the_server_ends_although_somebody_holds_its_pipe_open(home: Home):
    to_server, from_test = os.pipe()
    to_test, from_server = os.pipe()
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(home.root), str(to_server), str(from_server)],
        pass_fds=(to_server, from_server),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout
    server = int(host.stdout.readline())
    os.write(from_test, INITIALIZE)
    assert b'"id":1' in os.read(to_test, 65536), "the server is up before its host is killed"
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert gone(server)
    for fd in (to_server, from_test, to_test, from_server):
        os.close(fd)
