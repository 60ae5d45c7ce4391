"""User code that attacks the machine: every attack is stopped and named, or named as a gap.

The program of attacks (tests/faults/attacks) runs in real env processes, as root and as an ordinary
user, at every level of isolation: what a kernel or a container does not have is refused to the
client by a filter of its own or by capabilities taken away.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import doctor, dry_run
from engine.home.run_dir import Home
from envs.host.process import EnvProcess

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="the layers above the floor are Linux's"),
]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "attacks"
UID = 12345
SECRET = "canary-of-the-server-6b1f"
MARK = "27.182818"
LIMITS = {"memory_mb": 512, "processes": 40, "file_mb": 64, "call_seconds": 8.0}
TASK = {"id": "a", "prompt": [{"role": "user", "content": "attack"}], "answer": None}
STAYS = "-setuid,-setgid,-sys_admin,-net_admin"
WHO = {
    # Through env: the exec of setpriv itself still has root's reach.
    "user": ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env"],
    "root": [],
    "root without powers": ["setpriv", f"--bounding-set={STAYS}"],
}
# Who, which level is expected, and what the kernel refuses to the client.
PLACES = [
    ("user", "full", ()),
    ("user", "full", ("unshare",)),  # by bubblewrap, where it is installed
    ("user", "no-namespaces", ("namespaces",)),
    ("user", "limits", ("namespaces", "landlock")),
    ("user", "limits", ("namespaces", "seccomp")),
    ("root", "full", ()),
    ("root", "no-namespaces", ("namespaces",)),
    ("root", "limits", ("namespaces", "landlock", "seccomp")),
    ("root without powers", "no-namespaces", ()),
]


def inner(body: str) -> dict[str, str]:
    """Code a model might write: `body` is what it tries."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return {
        "code": "import os, socket, signal, ctypes\ndef attempt():\n    try:\n"
        f"{lines}\n        return 'worked'\n    except OSError:\n        return 'stopped'\n"
    }


# What agents read as instructions or run by themselves.
AGENT_FILES = (
    ".mcp.json",
    ".claude/settings.json",
    ".codex/config.toml",
    ".cursor/mcp.json",
    ".vscode/tasks.json",
    "AGENTS.md",
    "CLAUDE.md",
    ".git/hooks/pre-commit",
)
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
LOADER = f"os.execv({LOADERS[os.uname().machine]!r}, ['ld', '/bin/true'])"
MEMORY = """held = os.memfd_create('x')
os.write(held, open('/bin/true', 'rb').read())
os.execv(f'/proc/self/fd/{held}', ['true'])"""


def attacks(victim: dict[str, Any], folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every attack by row and name."""
    mine = str(folder / "own")
    return {
        "a2 forks": ("forks", {"many": 400}),
        "a2 memory": ("memory", {"mb": 1536}),
        "a2 one large file": ("one_large_file", {"mb": 300}),
        "a2 many files": ("many_files", {"mb": 512}),
        "a3 ssh key": ("read", {"path": f"{mine}/.ssh/id"}),
        "a3 hub token": ("read", {"path": f"{mine}/.cache/huggingface/token"}),
        "a3 server token": ("read", {"path": f"{mine}/kept/token"}),
        "a3 other run": ("read", {"path": f"{mine}/kept/runs/other/rollouts.jsonl"}),
        "a3 list the home": ("list_folder", {"path": f"{mine}/kept"}),
        "a3 through a link": ("read_through_a_link", {"path": f"{mine}/.ssh/id"}),
        "a3 hard link": ("link_and_read", {"path": f"{mine}/.ssh/id"}),
        "a3 own variables": ("find_a_variable", {"name": "SERVER_SECRET"}),
        "a3 server variables": ("read", {"path": f"/proc/{victim['pid']}/environ"}),
        "a3 client variables": ("read", {"path": f"/proc/{os.getpid()}/environ"}),
        "a3 write a cache": ("write", {"path": f"{mine}/.cache/planted"}),
        "a3 write a package": ("write", {"path": f"{mine}/site-packages/planted.py"}),
        "a3 write our package": ("write", {"path": f"{folder}/envs/planted.py"}),
        "a3 write through a link": ("write_through_a_link", {"path": f"{mine}/planted"}),
        "a3 cut a file": ("truncate", {"path": f"{mine}/kept/runs/other/rollouts.jsonl"}),
        "a3 cut a file that is read": (
            "cut_by_opening",
            {"path": f"{mine}/kept/runs/other/rollouts.jsonl", "access": os.O_RDONLY},
        ),
        "a3 cut a file not read": (
            "cut_by_opening",
            {"path": f"{mine}/kept/runs/other/rollouts.jsonl", "access": 3},
        ),
        "a3 remove a file": ("remove", {"path": f"{mine}/kept/runs/other/events.jsonl"}),
        "a3 open to all": ("open_to_all", {"path": f"{mine}/.ssh/id"}),
        "a3 memory of the server": ("read_memory", {"pid": victim["pid"]}),
        **{
            f"a23 write {name}": ("write", {"path": f"{mine}/project/{name}"})
            for name in AGENT_FILES
        },
        "a25 root of the process": ("read", {"path": f"/proc/self/root{mine}/.ssh/id"}),
        "a25 folder of the process": ("read", {"path": f"/proc/self/cwd/../../../{mine}/.ssh/id"}),
        "a25 inherited descriptors": ("read_beside_descriptors", {"path": f"{mine}/.ssh/id"}),
        "a25 the loader": (
            "read_by_the_loader",
            {"path": f"{mine}/.ssh/id", "loader": LOADERS[os.uname().machine]},
        ),
        "a25 a program in memory": ("read_from_memory", {"path": f"{mine}/.ssh/id"}),
        "a25 model runs the loader": ("model_writes", inner(LOADER)),
        "a25 model runs from memory": ("model_writes", inner(MEMORY)),
        "a25 model by the root": ("model_writes", inner(f"open('/proc/self/root{mine}/.ssh/id')")),
        "a4 tcp": ("tcp", {"port": victim["tcp"]}),
        "a4 udp": ("udp", {"port": victim["udp"]}),
        "a4 dns": ("dns", {}),
        "a4 metadata service": ("metadata_service", {}),
        "a4 path socket": ("path_socket", {"path": victim["path"]}),
        "a4 letter from a pair": ("letter_from_a_pair", {"path": victim["letters"]}),
        "a4 abstract socket": ("abstract_socket", {"name": victim["abstract"]}),
        "a4 listen": ("listen", {}),
        "a4 netlink": ("netlink", {}),
        "a4 user namespace": ("user_namespace", {}),
        "a4 io_uring": ("io_uring", {}),
        "a4 mount": ("mount_over", {"path": mine}),
        "a5 signal the server": ("send_signal", {"pid": victim["pid"]}),
        "a5 signal the client": ("send_signal", {"pid": "client"}),
        "a5 signal a thread of it": ("signal_a_thread", {"pid": victim["pid"]}),
        "a5 signal through a file": ("signal_through_a_file", {"pid": victim["pid"]}),
        "a5 limit the server": ("limit", {"pid": victim["pid"]}),
        "a5 limit the client": ("limit", {"pid": "client"}),
        "a5 slow the server": ("slow_down", {"pid": victim["pid"]}),
        "a5 schedule the server": ("schedule", {"pid": victim["pid"]}),
        "a5 bind the server": ("bind_to_one_core", {"pid": victim["pid"]}),
        "a5 memory it shares": ("shared_memory", {"known": victim["memory"]}),
        "a5 kill its group": ("kill_the_group", {"pid": victim["pid"]}),
        "a5 trace the server": ("trace", {"pid": victim["pid"]}),
        "a6 model reads the server": ("model_writes", inner(f"open('{mine}/.ssh/id').read()")),
        "a6 model reads the scorer": (
            "model_writes",
            inner("open(f'/proc/{os.getppid()}/environ').read()"),
        ),
        "a6 model reads the data": ("model_writes", inner("os.listdir('../../source')")),
        "a6 model signals the scorer": ("model_writes", inner("os.kill(os.getppid(), 9)")),
        "a6 model limits the scorer": (
            "model_writes",
            inner("import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))"),
        ),
        "a6 model slows the scorer": (
            "model_writes",
            inner("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)"),
        ),
        "a6 model sends a letter": (
            "model_writes",
            inner(
                "pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
                f"pair[0].sendto(b'x', '{victim['letters']}')"
            ),
        ),
        "a6 model signals through a file": (
            "model_writes",
            inner("import fcntl\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())"),
        ),
        "a6 model forks": ("model_writes", inner("os.fork() or os._exit(0)")),
        "a6 model starts a program": (
            "model_writes",
            inner("os.execv('/bin/true', ['true'])"),
        ),
        "a6 model connects": ("model_writes", inner("socket.socket().close()")),
        "a6 model spins": ("model_hangs", {"code": "while True: pass"}),
        "a6 model sleeps": (
            "model_hangs",
            {"code": "import signal, time\nsignal.alarm(0)\ntime.sleep(60)"},
        ),
        "f11 daemon": ("leave_a_daemon", {"mark": MARK}),
    }


# Attacks that some levels cannot stop, and the words by which doctor names that gap.
FILES, CALLS = "files of this user", "no system call is refused"
NAMED = {
    **dict.fromkeys(
        (
            "a3 ssh key",
            "a3 hub token",
            "a3 server token",
            "a3 other run",
            "a3 list the home",
            "a3 through a link",
            "a3 hard link",
            "a3 write a cache",
            "a3 write a package",
            "a3 write our package",
            "a3 write through a link",
            "a3 cut a file",
            "a3 remove a file",
            "a3 cut a file that is read",
            "a3 cut a file not read",
            "a3 server variables",
            "a3 client variables",
            "a3 memory of the server",
            *(f"a23 write {name}" for name in AGENT_FILES),
            "a25 root of the process",
            "a25 folder of the process",
            "a25 inherited descriptors",
            "a25 the loader",
            "a25 a program in memory",
            "a25 model by the root",
            "a6 model reads the server",
            "a6 model reads the scorer",
            "a6 model reads the data",
        ),
        ("files ",),
    ),
    **dict.fromkeys(
        (
            "a4 tcp",
            "a4 udp",
            "a4 dns",
            "a4 metadata service",
            "a4 path socket",
            "a4 abstract socket",
            "a4 listen",
            "a4 netlink",
            "a4 user namespace",
            "a4 io_uring",
            "a4 mount",
            "a4 letter from a pair",
            "a5 signal the server",
            "a5 signal the client",
            "a5 kill its group",
            "a5 signal a thread of it",
            "a5 limit the server",
            "a5 limit the client",
            "a5 slow the server",
            "a5 schedule the server",
            "a5 bind the server",
            "a5 memory it shares",
            "a5 trace the server",
            "a6 model signals the scorer",
            "a6 model limits the scorer",
            "a6 model slows the scorer",
            "a6 model sends a letter",
            "a6 model signals through a file",
            "a6 model forks",
            "a6 model starts a program",
            "a6 model connects",
            "a25 model runs the loader",
            "a25 model runs from memory",
        ),
        (CALLS,),
    ),
    "a3 open to all": ("modes and times", FILES),
    "a2 many files": ("how much its files take together",),
    "a2 forks": ("its processes are not counted", "count"),
}
WORKS = {"f11 daemon"}  # it may start; what matters is that it ends
NOBODY = {"pid": 0, "tcp": 0, "udp": 0, "path": "", "abstract": "", "letters": "", "memory": 0}
NAMES = list(attacks(NOBODY, Path("/")))


def interpreter() -> str:
    """One that any user may run."""
    for found in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        tried = subprocess.run(
            [*WHO["user"], found, "-I", "-c", "import sys; assert sys.version_info >= (3, 11)"],
            capture_output=True,
            check=False,
        )
        if tried.returncode == 0:
            return found
    pytest.skip("no interpreter of 3.11 or newer lies where an ordinary user may run it")


@contextlib.contextmanager
def open_to_all() -> Iterator[Path]:
    """A folder any user can reach, with our package and the attacks in it."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("changing the uid and powers of a client needs root and setpriv")
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    try:
        folder.chmod(0o755)
        shutil.copytree(ROOT / "envs", folder / "envs", ignore=shutil.ignore_patterns("__py*"))
        shutil.copytree(HERE, folder / "tests" / "faults" / "attacks")
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stage() -> Iterator[Path]:
    """The folder for all attacks of this file."""
    with open_to_all() as folder:
        yield folder


def furnish(folder: Path, uid: int) -> None:
    """What the attacks are after, owned by `uid` and readable by nobody else."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in (
        ".ssh/id",
        ".cache/huggingface/token",
        "kept/token",
        "kept/runs/other/rollouts.jsonl",
        "kept/runs/other/events.jsonl",
        "site-packages/package.py",
        *(f"project/{name}" for name in AGENT_FILES),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)
        path.chmod(0o600)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)
    (folder / "kept").chmod(0o700)


def client(
    stage: Path, python: str, who: str, refused: tuple[str, ...], **order: Any
) -> dict[str, Any]:
    given = {
        "env": str(program(stage, "client").parent),
        "attacks": [],
        "limits": LIMITS,
        "sandbox": {},
        "refused": refused,
    }
    done = subprocess.run(
        [*WHO[who], python, "-I", "-B", str(program(stage, "client")), json.dumps(given | order)],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.defpath, "HOME": str(stage / "own"), "SERVER_SECRET": SECRET},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=PLACES, ids=lambda p: "-".join((p[0], p[1], *p[2])))
def place(request: pytest.FixtureRequest, stage: Path) -> tuple[str, str, dict[str, Any]]:
    """All attacks, run once: who ran them, the level expected, what came of them by name."""
    who, level, refused = request.param
    if "unshare" in refused and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    python = interpreter()
    uid = UID if who == "user" else 0
    own = stage / "own"
    furnish(own, uid)
    victim = subprocess.Popen(
        [*WHO["user" if uid else "root"], python, "-I", str(program(stage, "victim")), str(own)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"VICTIM": SECRET},
        start_new_session=True,
        text=True,
    )
    try:
        assert victim.stdout is not None
        listed = attacks(json.loads(victim.stdout.readline()), stage)
        # Nothing else is between root and its files here: it is the worst place there is.
        sandbox = {"hidden": [str(own / "kept")], "allow_root": True}
        said = client(stage, python, who, refused, attacks=list(listed.values()), sandbox=sandbox)
        assert said["problem"] is None, said["problem"]
        assert victim.poll() is None, "an attack ended the victim"
    finally:
        victim.kill()
        victim.communicate()
    said["by_name"] = dict(zip(listed, said["scores"], strict=True))
    return who, level, said


def program(stage: Path, name: str) -> Path:
    return stage / "tests" / "faults" / "attacks" / f"{name}.py"


def sleepers() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[-1:] == [MARK]
    ]


def eventually(check: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def gone_within(seconds: float) -> bool:
    return eventually(lambda: not sleepers(), seconds)


def test_a3_the_level_is_the_one_this_place_allows(place: tuple[str, str, dict[str, Any]]) -> None:
    who, level, said = place
    if level == "full" and said["level"] != "full":
        pytest.skip(f"this kernel gives {who} no namespaces: {said['gaps']}")
    assert said["level"] == level
    assert (said["gaps"] == []) == (level == "full" and "bubblewrap" not in said["holds"])


@pytest.mark.parametrize("name", NAMES)
def test_a2_to_a6_and_f11_every_attack_is_stopped_by_name_or_the_gap_is_named(
    place: tuple[str, str, dict[str, Any]], name: str
) -> None:
    score = place[2]["by_name"][name]
    if score["error"] is not None:
        assert score["reward"] == 0.0
        assert "Error" in score["error"] or "killed by signal" in score["error"]
        return
    if name not in WORKS:
        gaps = "; ".join(place[2]["gaps"])
        assert any(words in gaps for words in NAMED.get(name, ())), f"not named in: {gaps}"


def test_f11_no_daemon_of_an_attack_is_left(place: tuple[str, str, dict[str, Any]]) -> None:
    assert place[2]["by_name"]["f11 daemon"]["error"] is None or place[0] == "root without powers"
    assert gone_within(1.0)


def test_a3_nothing_secret_comes_back_in_an_answer(place: tuple[str, str, dict[str, Any]]) -> None:
    assert SECRET not in json.dumps(place[2])


REFUSALS = [
    ("user", ("namespaces", "landlock"), {"mode": "required"}),
    ("user", ("namespaces", "seccomp"), {"mode": "required"}),
    ("root", ("namespaces", "landlock", "seccomp"), {"mode": "required"}),
    ("root without powers", ("landlock",), {"mode": "auto"}),
    ("root without powers", (), {"mode": "off"}),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: "-".join((c[0], c[2]["mode"], *c[1])))
def test_a3_user_code_is_refused_by_name_where_the_sandbox_is_too_weak(
    stage: Path, case: tuple[str, tuple[str, ...], dict[str, Any]]
) -> None:
    who, refused, sandbox = case
    said = client(stage, interpreter(), who, refused, sandbox=sandbox)
    assert said["problem"]["code"] == "ENV_SANDBOX"
    named = "required" if sandbox["mode"] == "required" else "allow_root = true"
    assert named in said["problem"]["message"] + said["problem"]["hint"]


def test_a3_a_weak_sandbox_is_enough_where_the_owner_says_so(stage: Path) -> None:
    python = interpreter()
    weak = client(stage, python, "root without powers", ("landlock",), sandbox={"allow_root": True})
    assert weak["problem"] is None and weak["level"] == "limits"
    required = client(stage, python, "user", ("namespaces",), sandbox={"mode": "required"})
    assert required["problem"] is None and required["level"] == "no-namespaces"


def test_f11_a_daemon_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with EnvProcess(program(ROOT, "client").parent) as process:
        if process.level != "full":
            assert "what user code started outlives" in "; ".join(process.gaps)
            pytest.skip(f"only namespaces end it, and this is {process.level}")
        order = json.dumps({"attack": "leave_a_daemon", "with": {"mark": MARK}})
        assert process.score(TASK, order)["error"] is None
        assert eventually(lambda: bool(sleepers()), 10.0)
        assert process._pipe is not None
        os.kill(process._pipe.parent.pid, signal.SIGKILL)
        assert gone_within(1.0)


def test_a3_doctor_and_dry_run_name_the_level(home: Home, stage: Path) -> None:
    finding = next(c for c in doctor.examine(home)["checks"] if c["name"] == "isolation")
    check = next(c for c in dry_run.dry_run(home, "none@000")["checks"] if c["name"] == "isolation")
    for said in (finding, check):
        assert said["detail"].partition(":")[0] in ("full", "no-namespaces", "limits")
    home.config_file.write_text('sandbox = "off"\n')
    finding = next(c for c in doctor.examine(home)["checks"] if c["name"] == "isolation")
    assert finding["status"] == "warn" and 'sandbox = "off"' in finding["detail"]
