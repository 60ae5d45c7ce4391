"""The parent of user code: it confines user code before it starts and kills all of it at the end.

envs/host/pipe.py starts this script on the server's own interpreter without `site`; only the
package `envs` is made importable there, and the environment's packages when the child is confined.
It forks once. The child loads and serves the environment (envs/host/child.py), installs its
packages (envs/host/installer.py) or becomes a command (envs/host/program.py). The parent copies the
child's output into a capped log and waits. When the client goes away (descriptor 0 reaches its end)
or the child ends, every descendant is killed, daemons included, and the private folder is removed.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING


def _import_envs() -> None:
    """Import the package `envs` without adding its parent folder to `sys.path`, so that nothing
    else in that folder can be imported."""
    folder = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "envs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    package = importlib.util.module_from_spec(spec)
    sys.modules["envs"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _import_envs()

from envs.config.endpoints import PLACE  # noqa: E402
from envs.config.problem import EnvProblem  # noqa: E402
from envs.host import child  # noqa: E402
from envs.host.launch import Launch, Program  # noqa: E402
from envs.host.redact import SecretFilter  # noqa: E402
from envs.isolation import confine, descendants, kernel, namespaces, packages, sandbox  # noqa: E402
from envs.isolation.sandbox import Reach  # noqa: E402
from envs.json_types import Reply  # noqa: E402

if TYPE_CHECKING:
    from envs.host.program import ProgramBox

LIFELINE = 0  # a pipe from the client: when the client closes it or dies, everything is killed
LOG_LINE = 8192  # a longer line is cut, so that nothing unbounded is held in memory
TAIL = 1500  # bytes of the last output that are kept for messages


class Log:
    """The log of user code's output: a file up to a size, with the values of secrets replaced.

    Args:
        path: the file to append to; "" for none.
        cap: how many bytes the file may have.
        secrets: replaces the values of secrets in every line.
    """

    def __init__(self, path: str, cap: int, secrets: SecretFilter) -> None:
        """Open the log file `path`, if it is not ""; `cap` is how many bytes it may have, `secrets`
        replaces the values of secrets in it."""
        self.cap = cap
        self.secrets = secrets
        self.pending = b""  # the beginning of a line that has not ended
        self.tail = b""  # the last output, at most TAIL bytes
        self.fd = -1  # descriptor of the file; -1 for none
        self.written = 0  # bytes in the file, including those of earlier processes
        if path:
            with contextlib.suppress(OSError):  # an environment runs without its log too
                self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self.written = os.fstat(self.fd).st_size

    def feed(self, data: bytes) -> None:
        """Add output. Complete lines go to the file at once; the rest is kept until its line ends
        or exceeds LOG_LINE bytes."""
        *complete_lines, self.pending = (self.pending + data).split(b"\n")
        for line in complete_lines:
            self._write_line(line + b"\n")
        if len(self.pending) > LOG_LINE:
            self._write_line(self.pending + b"\n")
            self.pending = b""

    def close(self) -> str:
        """Write the incomplete last line; return the last output, at most TAIL bytes, as text."""
        if self.pending:
            self._write_line(self.pending + b"\n")
        return self.tail.decode("utf-8", "replace")

    def _write_line(self, line: bytes) -> None:
        """Replace the secrets in one line, then append it to the tail, and to the file if it fits.

        Instead of the first line that would exceed `cap`, the file gets a note that the rest is
        dropped.
        """
        if len(line) > LOG_LINE:
            line = line[:LOG_LINE] + b" ...\n"
        line = self.secrets.in_bytes(line)  # replaces them
        self.tail = (self.tail + line)[-TAIL:]
        if self.fd < 0 or self.written >= self.cap:  # no file, or it is full
            return
        if self.written + len(line) > self.cap:
            line = b"... output above %d bytes is dropped\n" % self.cap
            self.written = self.cap  # nothing is written after this note
        self.written += len(line)
        with contextlib.suppress(OSError):  # a full disk must not end the environment
            os.write(self.fd, line)


def main() -> None:
    """Run user code in a confined child process, log its output, and clean up at the end.

    The first command line argument is the launch (what to run, and how) as JSON. The last message
    to the client says how the child ended, as {"exit": {"code", "signal", "tail"}}.
    """
    launch = Launch.from_json(sys.argv[1])
    # Who made the namespaces; `launch.spaces` is set if bubblewrap has started this program again.
    spaces = launch.spaces or _enter_namespaces(launch)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the cleanup below runs
    kernel.become_subreaper()
    os.umask(0o022)  # user code may run as another uid, which has to read the copy
    box = Path(launch.box)
    # Never closed: as long as this process lives, the lock says that the folder is in use.
    fcntl.flock(os.open(box, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
    try:
        _fill_box(box, launch.source)
        ending = _run_to_end(launch, box, spaces)
        _report_ending(launch.replies, ending)
    finally:
        descendants.kill_all(group=0)
        shutil.rmtree(box, ignore_errors=True)


def _report_ending(replies: int, ending: dict[str, object]) -> None:
    """Send the client the last message, {"exit": ending}, which says how the child ended; `replies`
    is the descriptor of the pipe to it."""
    message = {"exit": ending}
    with contextlib.suppress(OSError):  # the client may be gone
        # The first line end closes a line that the child may have left half written.
        os.write(replies, b"\n" + json.dumps(message).encode() + b"\n")


def _fill_box(box: Path, source: str) -> None:
    """Fill the private folder `box` for the child: a copy of the environment's folder `source`, a
    folder `work` to write to, and CANARY, a file that the child must not be able to read."""
    # A copy, so that user code cannot change the stored version and needs no access to the home.
    _copy_plain_files(source, box / "source")
    (box / "work").mkdir()
    (box / sandbox.CANARY).touch()


def _run_to_end(launch: Launch, box: Path, spaces: str) -> dict[str, object]:
    """Run the child, log its output, and kill the processes that it leaves behind.

    Returns how the child ended: `code` (exit code), `signal` (that killed it), `tail` (its last
    output) and, for a program, what the client must know of it. `box` is the child's private
    folder; `spaces` says who made the namespaces of this process: "own" for this process,
    "bubblewrap", or "" for none.
    """
    secrets = SecretFilter((name, os.environ.get(name, "")) for name in launch.secrets)
    log = Log(launch.log, launch.log_cap, secrets)
    output_reader, output_writer = os.pipe()
    status_reader, status_writer = os.pipe()
    program = _program_box(launch.program) if launch.program else None
    pid = _fork_child(launch, box, spaces, (output_writer, status_writer), program)
    # The child has its own copies. An open writer here would keep the output from ever ending.
    for fd in (output_writer, status_writer, launch.requests):
        os.close(fd)
    ending = _watch(pid, output_reader, log, status_reader)
    if program:
        children = descendants.by_parent()
        if pid in children.get(os.getpid(), []):  # the client has left, and it has not ended
            program.let_end(children.get(pid, []) if spaces == "own" else [pid])
    all_dead = descendants.kill_all(group=pid)
    _drain(output_reader, log)  # what was printed since the last read
    program_ending = program.ending(all_dead) if program else {}
    return {**ending, **program_ending, "tail": log.close()}


def _program_box(program: Program) -> "ProgramBox":
    """Return the helper that prepares a program, runs it in the sandbox, and reads its reward
    file."""
    from envs.host.program import ProgramBox  # noqa: PLC0415 - rarely needed, and slow to import

    return ProgramBox(program)


def _fork_child(
    launch: Launch, box: Path, spaces: str, writers: tuple[int, int], program: "ProgramBox | None"
) -> int:
    """Fork the process that confines itself and runs the child; return its pid.

    Args:
        launch: what to run.
        box: the private folder, already filled.
        spaces: who made the namespaces of this process: "own" for this process, "bubblewrap", or
            "".
        writers: descriptors for the child's standard output and error, and for its exit status
            (used if `spaces` is "own": the process forked here then forks the child in turn).
        program: the helper for the launch's program, None if it has none.
    """
    output_writer, status_writer = writers
    limits = launch.limits
    reach = _child_reach(launch)
    uid = _give_to_spare_uid(box, reach)
    # New namespaces come with an empty network, unless the environment may use the machine's.
    offline = not limits.network and (spaces != "" or confine.cut_network())
    if program is not None:  # after the lines above: it must listen in the child's network
        reach = replace(reach, gateway=program.listen())
    if launch.relay >= 0:  # user code may ask models by name, at the address in PLACE
        reach = replace(reach, gateway=namespaces.hand_over_listener(launch.relay))
        os.environ[PLACE] = f"http://127.0.0.1:{reach.gateway}"
    if reach.serves:
        reach = replace(reach, server=namespaces.port_for_server())
    reach = _with_rooms(reach, spaces)
    inside = Path(namespaces.BOX_INSIDE) if reach.rooms else box  # where the child finds its box
    confine_process = partial(  # called in the child, because `close` confines the caller
        sandbox.confine_process, limits, launch.sandbox, inside, uid, spaces, offline, reach
    )
    child_launch = replace(launch, box=str(inside))
    run_child = _child_runner(child_launch, confine_process, spaces, output_writer, program)
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        if spaces == "own":
            owner_uid = os.geteuid() if uid is None else uid
            namespaces.first_process(  # forks the child, and never returns
                str(box),
                owner_uid,
                launch.room_mb,
                status_writer,
                run_child,
                reach.writable,
                reach.rooms,
            )
        run_child()
    except OSError as error:  # the folders that the environment asks for
        os.write(output_writer, f"{', '.join(reach.rooms)} cannot be made: {error}\n".encode())
    finally:
        os._exit(1)  # reached only if something failed: `run_child` leaves the process


def _with_rooms(reach: Reach, spaces: str) -> Reach:
    """Return `reach` with those of its rooms that can be made, and name them in the child's
    environment variables. `spaces` says who made the namespaces; rooms need our own."""
    our_package = str(Path(__file__).resolve().parents[1])
    needed = [*reach.readable, *reach.writable, our_package]
    rooms = namespaces.rooms_for(reach.rooms, needed) if spaces == "own" else ()
    os.environ.pop(namespaces.ROOMS_SAID, None)
    if rooms:
        os.environ[namespaces.ROOMS_SAID] = ":".join(rooms)
    return replace(reach, rooms=rooms)


def _child_runner(
    launch: Launch,
    confine_process: Callable[[], sandbox.Confinement],
    spaces: str,
    output: int,
    program: "ProgramBox | None",
) -> Callable[[], None]:
    """Return the function that runs the child, to be called after the fork.

    This function itself is called before the fork, because the child needs the pid of this process
    and the /proc that this process sees.

    Args:
        launch: what to run.
        confine_process: confines the process it is called in.
        spaces: who made the namespaces of this process: "own", "bubblewrap", or "" for none.
        output: descriptor for the child's standard output and error.
        program: the helper for the launch's program, None if it has none.
    """
    this_pid = os.getpid()
    proc = _open_proc()

    def run_child() -> None:
        """Run the child in the forked process."""
        # In "own" namespaces the child's parent is their first process, number 1.
        parent = 1 if spaces == "own" else this_pid
        # Inside bubblewrap even `proc` shows other pids than those that the client sees.
        pid = None if spaces == "bubblewrap" else _pid_in(proc)
        _run_child(launch, confine_process, output, parent, pid, program)

    return run_child


def _give_to_spare_uid(box: Path, reach: Reach) -> int | None:
    """Choose an unused uid for user code and make it the owner of `box` and of the folders that
    user code may write to. Returns the uid; None if user code keeps the present user, as
    `confine.spare_uid` decides: this process is not root's, or no uid can enter the folders."""
    our_package = str(Path(__file__).resolve().parents[1])  # `envs`, whose code the child runs
    # The new uid has to read all these folders; there is none if they cannot be made readable.
    uid = confine.spare_uid([*reach.readable, *reach.writable, our_package], box)
    if uid is not None:
        for path in (box, box / "work", *reach.writable):
            os.chown(path, uid, uid)
    return uid


def _enter_namespaces(launch: Launch) -> str:
    """Put this process into new namespaces, as far as this machine allows.

    Returns "own" if that worked, and "" if the sandbox is off or namespaces are impossible. If only
    bubblewrap may make them, this program is started again inside bubblewrap: no return.
    """
    if launch.sandbox.mode == "off":
        return ""
    network = launch.limits.network
    if namespaces.enter(network):
        return "own"
    is_root = os.geteuid() == 0  # what the kernel refuses root, bubblewrap cannot do either
    bwrap_command = [] if is_root else namespaces.bwrap(network)
    if bwrap_command:
        for fd in (launch.requests, launch.replies, *launch.gateways):
            os.set_inheritable(fd, True)
        new_launch = replace(launch, spaces="bubblewrap").to_json()
        # The command line of this process, with the new launch in place of its last argument.
        os.execv(bwrap_command[0], [*bwrap_command, *sys.orig_argv[:-1], new_launch])
    return ""


def _child_reach(launch: Launch) -> Reach:
    """Return what the child may reach besides the system's files: `launch.reach`, plus the folders
    of the packages among the readable ones (as real paths, without links)."""
    needed = [*launch.packages.folders, launch.packages.prefix, *launch.reach.readable]
    return replace(launch.reach, readable=sandbox.interpreter_folders(needed))


def _copy_plain_files(source: str, target: Path) -> None:
    """Copy the folder `source` to `target`, which must not exist yet.

    Only regular files and folders are copied: no links, no names that begin with a dot, and no
    __pycache__.
    """
    target.mkdir()
    for entry in os.scandir(source):
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir(follow_symlinks=False):
            _copy_plain_files(entry.path, target / entry.name)
        elif entry.is_file(follow_symlinks=False):
            shutil.copyfile(entry.path, target / entry.name)


def _run_child(
    launch: Launch,
    confine_process: Callable[[], sandbox.Confinement],
    output: int,
    parent: int,
    pid: int | None,
    program: "ProgramBox | None",
) -> None:
    """Confine this process, then load and serve the environment, install packages, or run a
    program. Never returns: the process exits when it is done.

    Args:
        launch: what to run.
        confine_process: confines this process and returns the isolation that it then has.
        output: file descriptor for standard output and error.
        parent: the parent's pid as this process sees it; if it differs, the parent has died.
        pid: this process's pid as the client sees it, to be sent to the client; None if unknown.
        program: the helper for the launch's program, None if it has none.
    """
    try:
        _separate(Path(launch.box, "work"), output)
        program_fds = [] if program is None else [program.child_fd]
        _close_all_but(launch.requests, launch.replies, *program_fds)
        confinement = confine_process()
        # This comes after the change of uid, which would clear the request.
        kernel.die_with_parent()
        if os.getppid() != parent:  # the parent died before the request
            return
        _send(launch.replies, {"hello": _hello(confinement, pid)})
        problem = sandbox.refusal(confinement, launch.sandbox)
        if problem is None and launch.install is None and program is None:
            problem = _problem_of_packages(launch)
        if problem is not None:
            _send(launch.replies, {"problem": problem.to_dict()})
        else:
            _serve(launch, program)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _serve(launch: Launch, program: "ProgramBox | None") -> None:
    """Do the child's work: become the program of `program` if there is one, install packages if
    `launch.install` is set, else load the environment and answer requests until the client goes."""
    source = Path(launch.box, "source")
    if program is not None:
        program.run(source, launch.requests, launch.replies)  # never returns
    if launch.install is not None:
        from envs.host import installer  # noqa: PLC0415 - rarely needed, and slow to import

        installer.serve(launch.replies, launch.install)
    else:
        child.serve(launch.requests, launch.replies, source)


def _hello(confinement: sandbox.Confinement, pid: int | None) -> Reply:
    """Return the content of the first message to the client: how this process is isolated, and its
    pid as the client sees it (None if unknown)."""
    return {
        "level": confinement.level,
        "isolation": ", ".join(confinement.holds),
        "gaps": confinement.gaps,
        "pid": pid,
    }


def _separate(work: Path, output: int) -> None:
    """Give this process its own process group, working folder and standard streams.

    Standard input becomes empty, standard output and error go to the descriptor `output`. `work` is
    the working folder; HOME and TMPDIR name it too.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # only the parent needs the inherited handler
    os.setpgid(0, 0)  # `descendants.kill_all` kills this group
    os.chdir(work)
    os.environ.update(HOME=str(work), TMPDIR=str(work))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _send(replies: int, message: Reply) -> None:
    """Write one line of JSON to the descriptor `replies`."""
    os.write(replies, json.dumps(message).encode() + b"\n")


def _problem_of_packages(launch: Launch) -> EnvProblem | None:
    """Make the environment's packages importable. Returns the problem if they cannot be used, else
    None."""
    try:
        packages.make_importable(launch.packages)
    except EnvProblem as problem:
        return problem
    return None


def _open_proc() -> int:
    """Return a file descriptor of /proc as it is mounted now, which shows the pids of the present
    namespace even if another /proc is mounted over it; -1 if there is no /proc."""
    with contextlib.suppress(OSError):
        return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    return -1


def _pid_in(proc: int) -> int | None:
    """Return the pid of this process in the namespace whose /proc is open as the descriptor `proc`.

    If that cannot be read, returns the pid in the process's own namespace.
    """
    with contextlib.suppress(OSError):
        return int(os.readlink("self", dir_fd=proc))  # the link /proc/self leads to the own pid
    return os.getpid()


def _close_all_but(*open_fds: int) -> None:
    """Close every descriptor above 2 except `open_fds`, so that user code does not inherit the log,
    the lock of the folder or anything else."""
    first = 3  # the first descriptor not dealt with yet; 0, 1 and 2 are the standard streams
    for fd in sorted(open_fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _watch(pid: int, output: int, log: Log, status_reader: int) -> dict[str, int]:
    """Wait until the child ends or the client is gone, moving output into the log meanwhile.

    Returns {"code": exit code of the child, "signal": signal that killed it}; one of the two is 0,
    and both are 0 if the client left first.

    Args:
        pid: the process that was forked.
        output: descriptor from which the child's output is read.
        log: where the output goes.
        status_reader: descriptor with the exit status of user code, if `pid` is only the first
            process of new namespaces; otherwise nothing is ever written to it.
    """
    os.set_blocking(output, False)
    signal_reader = _pipe_of_signals()  # readable when a child has ended: `poll` then returns
    poller = select.poll()
    for fd in (LIFELINE, output, signal_reader):
        poller.register(fd, select.POLLIN)
    while True:
        status = _reap(pid)
        if status is not None:
            # Prefer the status of user code; if none was written, take that of `pid` itself.
            status_of_user_code = os.read(status_reader, 16)
            return _ending_of(int(status_of_user_code or status))
        for fd, _ in poller.poll():
            if fd == LIFELINE:  # the client never writes there: readable means closed
                return {"code": 0, "signal": 0}
            if fd == signal_reader:
                os.read(signal_reader, 512)  # empty it; the loop then asks `_reap` what has ended
            elif not _drain(output, log, max_reads=1):
                poller.unregister(output)  # at its end `poll` would always return at once


def _pipe_of_signals() -> int:
    """Return the reading end of a pipe that gets a byte with every signal, e.g. when a child ends,
    so that a `poll` on it returns when a signal comes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    # A handler that does nothing, because a signal without one in Python writes no byte.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _ending_of(status: int) -> dict[str, int]:
    """Return the {"code": exit code, "signal": killing signal} in a wait status; one of the two is
    0."""
    code = os.waitstatus_to_exitcode(status)  # negative for a signal: -9 if signal 9 killed it
    return {"code": max(code, 0), "signal": max(-code, 0)}


def _reap(pid: int) -> int | None:
    """Return the exit status of the child `pid` if it has ended, else None. Does not wait.

    Orphans that have become children of this process are reaped too, because zombies would count
    against the limit on processes.
    """
    status = None
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            ended_pid, ended_status = os.waitpid(-1, os.WNOHANG)
            if not ended_pid:  # children are left, and none of them has ended
                break
            if ended_pid == pid:
                status = ended_status
    return status


def _drain(output: int, log: Log, max_reads: int = 64) -> bool:
    """Move what is in the pipe `output` into the log; return whether more may come (False at its
    end).

    Reads at most `max_reads` times, 64 KiB each, so that a child that keeps on printing cannot hold
    this process here.
    """
    for _ in range(max_reads):
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:  # nothing more for now
            return True
        if not data:
            return False
        log.feed(data)
    return True


if __name__ == "__main__":
    main()
