"""An environment that attacks the machine it runs on.

A completion is `{"attack": name, "with": {...}}`. An attack that works gives reward 1; one that is
stopped raises what the system told it, which is what its caller reads.
"""

import ctypes
import fcntl
import json
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from envs import Score, SingleTurnEnv, Task
from envs.rewards import code as scored_by_tests

ATTACKS = {}
MB = 1 << 20


def attack(function):
    ATTACKS[function.__name__] = function
    return function


class Env(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "attack", "x")]

    def score(self, task, completion):
        order = json.loads(completion)
        gained = ATTACKS[order["attack"]](**order["with"])
        return Score(1.0, metrics={"gained": float(gained)} if gained else {})


def load_environment():
    return Env()


@attack
def read(path):
    Path(path).read_bytes()


@attack
def list_folder(path):
    os.listdir(path)


@attack
def read_through_a_link(path):
    os.symlink(path, "link")
    try:
        Path("link").read_bytes()
    finally:
        os.unlink("link")


@attack
def find_a_variable(name):
    return len(os.environ[name])


@attack
def write(path):
    with open(path, "a") as file:
        file.write("x")


@attack
def write_through_a_link(path):
    os.symlink(path, "way_out")
    try:
        write("way_out")
    finally:
        os.unlink("way_out")


@attack
def link_and_read(path):
    os.link(path, "hard")
    Path("hard").read_bytes()


@attack
def truncate(path):
    os.truncate(path, 0)


@attack
def cut_by_opening(path, access):
    os.close(os.open(path, access | os.O_TRUNC))


@attack
def remove(path):
    os.unlink(path)


@attack
def open_to_all(path):
    os.chmod(path, 0o777)


@attack
def litter_shared_memory(path):
    write(path)
    time.sleep(0.2)  # while somebody outside looks


@attack
def read_beside_descriptors(path):
    """Through whatever file or folder was left open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            Path(f"/proc/self/fd/{name}/../../../..{path}").read_bytes()
            return
        except (NotADirectoryError, FileNotFoundError):
            continue
    raise PermissionError("no descriptor leads there")


def _shown(argv, run):
    done = subprocess.run([run, *argv[1:]], capture_output=True, pass_fds=argv[0])
    if done.returncode:
        raise PermissionError(done.stderr.decode()[-200:])


@attack
def read_by_the_loader(path, loader):
    """A file without the right to run is run by the loader of libraries."""
    shutil.copyfile("/bin/cat", "data")
    os.chmod("data", 0o600)
    _shown([(), "data", path], loader)


@attack
def read_from_memory(path):
    """A program that is in no folder."""
    held = os.memfd_create("program", 0)
    with open("/bin/cat", "rb") as program:
        os.write(held, program.read())
    _shown([(held,), path], f"/proc/self/fd/{held}")


@attack
def tcp(port):
    socket.create_connection(("127.0.0.1", port), 2).close()


@attack
def udp(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", port))


@attack
def dns():
    # Whether the name is found says nothing: a query that can be sent carries secrets away.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(bytes(12), ("127.0.0.1", 53))


@attack
def metadata_service():
    socket.create_connection(("169.254.169.254", 80), 1).close()


@attack
def path_socket(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


@attack
def letter_from_a_pair(path):
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        with end:
            end.sendto(b"x", path)


@attack
def abstract_socket(name):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + name)


@attack
def listen():
    socket.create_server(("127.0.0.1", 0)).close()


@attack
def netlink():
    socket.socket(16, socket.SOCK_RAW, 0).close()


@attack
def user_namespace():
    _call("unshare", 0x10000000)


@attack
def mount_over(path):
    _call("mount", b"none", path.encode(), b"tmpfs", 0, None)


@attack
def send_signal(pid):
    os.kill(pid, 0)


@attack
def limit(pid):
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


@attack
def slow_down(pid):
    os.setpriority(os.PRIO_PROCESS, pid, 19)


@attack
def schedule(pid):
    os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


@attack
def bind_to_one_core(pid):
    os.sched_setaffinity(pid, [min(os.sched_getaffinity(0))])


@attack
def signal_through_a_file(pid):
    """Nothing here says whether it arrives: that the victim lives does."""
    ends = os.pipe()
    try:
        fcntl.fcntl(ends[0], fcntl.F_SETOWN, pid)
        fcntl.fcntl(ends[0], fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(ends[1], b"x")
    finally:
        for end in ends:
            os.close(end)
    raise PermissionError("seen by the victim alone")


@attack
def signal_a_thread(pid):
    _call("tgkill", pid, pid, 0)


@attack
def shared_memory(known):
    _call("shmctl", known, 2, ctypes.create_string_buffer(256))


@attack
def kill_the_group(pid):
    os.killpg(pid, signal.SIGKILL)


@attack
def trace(pid):
    _call("ptrace", 16, pid, 0, 0)


@attack
def read_memory(pid):
    with open(f"/proc/{pid}/mem", "rb") as memory:
        memory.read(1)


@attack
def io_uring():
    if ctypes.CDLL(None, use_errno=True).syscall(425, 1, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")


@attack
def forks(many):
    made, (ends, held) = [], os.pipe()
    try:
        for _ in range(many):
            pid = os.fork()
            if pid == 0:
                os.close(held)
                os.read(ends, 1)
                os._exit(0)
            made.append(pid)
    finally:
        os.close(held)
        os.close(ends)
        for pid in made:
            os.waitpid(pid, 0)


@attack
def memory(mb):
    mmap.mmap(-1, mb * MB).close()


@attack
def one_large_file(mb):
    with open("large", "wb") as file:
        for _ in range(mb):
            file.write(bytes(MB))


@attack
def many_files(mb):
    try:
        for index in range(mb // 32):
            with open(f"part{index}", "wb") as file:
                file.write(bytes(32 * MB))
    finally:
        for path in Path(".").glob("part*"):
            path.unlink()


@attack
def leave_a_daemon(mark):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", mark])
        os._exit(0)
    os.wait()


@attack
def start_a_program():
    subprocess.run(["/bin/true"], check=True)


@attack
def model_writes(code):
    """What a model wrote, scored by tests: its `attempt()` says what it came to."""
    share = scored_by_tests(code, [{"call": "attempt()", "expect": "stopped"}])
    if share == 1.0:
        raise PermissionError("the inner box stopped it")


@attack
def model_hangs(code):
    """Time is kept by a process that the model's code cannot reach."""
    began = time.monotonic()
    scored_by_tests(code, [{"call": "1", "expect": 1}], timeout_s=0.5)
    if time.monotonic() - began < 4:
        raise TimeoutError("the inner box ended it")


def _call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
