"""What user code can reach: not our secrets, not our files, and nothing once it is closed."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from envs.config.settings import Limits
from envs.host.pipe import _remove_stale_folders
from envs.host.process import EnvProcess, isolation_here
from envs.isolation.sandbox import FULL, LIMITS, NO_NAMESPACES, Sandbox

TASK = {"id": "a", "prompt": [{"role": "user", "content": "q"}], "answer": None}
ROOT = Path(__file__).parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its uid")


@pytest.fixture
def ask(obedient: Path, start) -> Callable[..., str]:
    """Evaluates an expression in the env process and gives its repr."""

    def evaluate(expression: str, before: str = "", **options) -> str:
        process: EnvProcess = start(obedient, options.pop("limits", None), **options)
        code = f"!{before}\nraise Exception('<<' + repr({expression}) + '>>')"
        error = process.score(TASK, code)["error"]
        return error.partition("<<")[2].rpartition(">>")[0] or error

    return evaluate


def eventually(check: Callable[[], bool], seconds: float = 4.0) -> bool:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_variables_of_this_process_are_not_visible(ask, monkeypatch):
    monkeypatch.setenv("HONESMITH_CANARY", "canary-7f3a")
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    seen = ask("dict(os.environ)", "import os")
    assert "canary" not in seen
    assert "HF_TOKEN" not in seen and "HONESMITH_HOME" not in seen


def test_a_secret_is_visible_only_where_it_is_given(ask):
    assert ask("os.environ.get('KEY')", "import os") == "None"
    assert ask("len(os.environ['KEY'])", "import os", secrets={"KEY": "s3cret-value"}) == "12"


@pytest.mark.parametrize(
    "form",
    [
        "key",
        "__import__('base64').b64encode(key.encode()).decode()",
        "__import__('base64').b64encode(b'ab:' + key.encode() + b'c').decode()",
        "__import__('urllib.parse').parse.quote(key)",
        "__import__('json').dumps({'k': key})",
    ],
)
def test_the_value_of_a_secret_never_comes_back(obedient: Path, start, tmp_path: Path, form: str):
    value = 'sk-"quoted"/+secret&value'
    log = tmp_path / "env.log"
    process = start(obedient, secrets={"KEY": value}, log=log)
    code = f"!import os\nkey = os.environ['KEY']\nprint('said', {form})\nraise Exception({form})"
    error = process.score(TASK, code)["error"]
    process.close()
    assert "[secret KEY]" in error and "[secret KEY]" in log.read_text()
    for text in (error, log.read_text()):
        assert value not in text and "quoted" not in text and "c2stInF1b3RlZCIv" not in text


def test_it_works_in_a_folder_of_its_own(ask, obedient: Path, tmp_path: Path):
    work = ask("os.getcwd()", "import os").strip("'")
    assert not Path(work).is_relative_to(tmp_path)
    assert ask("tempfile.gettempdir() == os.getcwd()", "import os, tempfile") == "True"


def test_the_stored_files_cannot_be_changed_from_inside(obedient: Path, start):
    before = (obedient / "environment.py").read_text()
    process = start(obedient)
    process.score(TASK, "!import sys\nopen(sys.path[0] + '/environment.py', 'w').write('x')")
    process.close()
    assert (obedient / "environment.py").read_text() == before


def test_only_the_package_envs_is_lent_to_another_interpreter(ask):
    assert ask("sys.modules['envs'].__file__", "import sys").strip("'").endswith("envs/__init__.py")
    seen = ask("[p for p in sys.path if p.endswith('/envs')]", "import sys")
    assert seen == "[]"


def test_the_level_of_isolation_is_said(obedient: Path, start):
    process: EnvProcess = start(obedient, Limits(memory_mb=777))
    said = f"{process.level}: own process, clean environment, memory 777 MB"
    assert process.isolation.startswith(said)
    assert process.level in (FULL, NO_NAMESPACES, LIMITS)
    assert ("own uid" in process.isolation) == (os.geteuid() == 0)


def test_the_level_of_this_machine_can_be_asked_without_an_environment(obedient: Path, start):
    process: EnvProcess = start(obedient)
    held = isolation_here()
    assert held.level == process.level and list(held.gaps) == process.gaps
    assert process.isolation == f"{held.level}: {', '.join(held.holds)}"


@as_root
@linux
def test_root_drops_to_a_uid_that_nobody_has(ask, tmp_path: Path):
    uid, gid, groups = json.loads(
        ask("[os.getuid(), os.getgid(), os.getgroups()]", "import os").replace("'", '"')
    )
    assert uid == gid >= 60000 and groups == []
    assert psutil.Process().uids().real == 0
    secret = tmp_path / "token"
    secret.write_text("x")
    secret.chmod(0o600)
    assert "PermissionError" in ask(f"open({str(secret)!r}).read()")
    assert "Error" in ask(f"os.kill({os.getpid()}, 0)", "import os")


@linux
def test_no_descriptor_of_ours_is_inherited(ask, tmp_path: Path):
    is_open = (
        "import os\ndef is_open(fd):\n  try: os.fstat(fd)\n  except OSError: return False\n"
        "  return True"
    )
    # The three standard ones, requests, replies; not the log, and not the lock of the folder.
    assert int(ask("sum(map(is_open, range(256)))", is_open, log=tmp_path / "env.log")) <= 5


@linux
def test_it_reaches_its_own_folders_alone(ask):
    if isolation_here().level == LIMITS:
        pytest.skip("this kernel has no Landlock or no seccomp")
    with tempfile.TemporaryDirectory() as folder:
        public = Path(folder, "public")
        public.write_text("for everybody")
        for path in (Path(folder), public):
            path.chmod(0o777)
        assert "PermissionError" in ask(f"open({str(public)!r}).read()")
        assert "Error" in ask(f"open({str(public)!r}, 'w')")
        assert "Error" in ask(f"os.listdir({folder!r})", "import os")
        assert public.read_text() == "for everybody"
    assert ask("open('mine', 'w').write('x')") == "1"
    assert "PermissionError" in ask(
        "socket.socketpair()[0].close() or socket.socket()", "import socket"
    )


@as_root
@linux
def test_what_lies_beside_a_private_interpreter_is_hidden(ask):
    base = Path(sys.base_prefix)
    private = [p for p in base.parents if not p.stat().st_mode & 0o001]
    if not private:
        pytest.skip("the interpreter lies where everybody can read")
    top = private[-1]
    shown = ask(f"sorted(os.listdir({str(top)!r}))", "import os", sandbox=Sandbox("off"))
    assert shown == repr([base.relative_to(top).parts[0]])


@as_root
@linux
def test_there_is_no_network_unless_the_environment_asks(ask):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}), 1).close()"
        assert "Error" in ask(connect, "import socket")
        assert ask(connect, "import socket", limits=Limits(network=True)) == "None"


@linux
def test_forks_are_limited(obedient: Path, start):
    process = start(obedient, Limits(processes=20, call_seconds=4))
    bomb = (
        "!import os, time\npids = []\ntry:\n  for _ in range(2000):\n    pid = os.fork()\n"
        "    if pid == 0:\n      time.sleep(30)\n      os._exit(0)\n    pids.append(pid)\n"
        "except OSError: pass\nfrom envs import Score\nscore = Score(len(pids))"
    )
    made = process.score(TASK, bomb)["reward"]
    assert 0 < made < 2000
    if os.geteuid() == 0:
        assert made < 20


@linux
def test_a_daemon_does_not_survive_the_process(obedient: Path, start):
    process = start(obedient)
    daemon = (
        "!import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    os.execvp('sleep', ['sleep', '31.415'])\n  os._exit(0)\nos.wait()"
    )
    assert process.score(TASK, daemon)["error"] is None
    assert eventually(lambda: len(sleepers()) == 1)
    process.close()
    assert sleepers() == []


def sleepers() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[-1:] == ["31.415"]:
            found.append(process.pid)
    return found


@linux
def test_orphans_are_collected_and_do_not_use_up_the_limit(obedient: Path, start):
    process = start(obedient, Limits(processes=12))
    orphan = (
        "!import os\nif os.fork() == 0:\n  if os.fork() == 0: os._exit(0)\n  os._exit(0)\nos.wait()"
    )
    assert [process.score(TASK, orphan)["error"] for _ in range(40)] == [None] * 40


def test_what_a_killed_parent_left_is_swept_away_and_what_lives_is_not(
    obedient: Path, start, tmp_path: Path, monkeypatch
):
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    left, other = place / "honesmith-env-left", place / "something-else"
    for folder in (left, other):
        (folder / "work").mkdir(parents=True)
    living = start(obedient)
    assert living.score(TASK, "a")["error"] is None
    (box,) = set(place.iterdir()) - {left, other}
    for folder in (left, other, box):
        os.utime(folder, (1, 1))
    _remove_stale_folders.cache_clear()
    start(obedient).describe()
    assert not left.exists() and other.exists() and (box / "work").exists()
    assert living.score(TASK, "a")["error"] is None and living.generation == 1


@linux
def test_user_code_dies_with_its_parent(obedient: Path, start):
    process = start(obedient)
    process.describe()
    pid = process.pid
    os.kill(process._pipe.parent.pid, signal.SIGKILL)
    assert eventually(lambda: not running(pid))
    assert "lost" in process.score(TASK, "a")["error"]
    assert process.score(TASK, "a")["error"] is None


CLIENT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from envs.host.pipe import _remove_stale_folders
from envs.host.process import EnvProcess, isolation_here
process = EnvProcess(Path({folder!r}))
process.describe()
print(process.pid, flush=True)
sys.stdin.read()
"""


@linux
@pytest.mark.parametrize("busy", [False, True])
def test_it_dies_with_its_client(obedient: Path, busy: bool):
    code = CLIENT.format(root=str(ROOT), folder=str(obedient))
    if busy:
        task = {"id": "a", "prompt": [{"role": "user", "content": "q"}], "answer": None}
        spin = f"process.score({task!r}, '!while True: pass')\nsys.stdin.read()"
        code = code.replace("sys.stdin.read()", spin)
    client = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None and client.stdin is not None
    pid = int(client.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    assert eventually(lambda: not running(pid))
    client.stdin.close()
    client.stdout.close()


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


USER = """
import ctypes, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from envs.isolation import confine
needed = [p for p in sys.path if p] + [sys.prefix, sys.base_prefix]
folders = {{Path(p).resolve() for p in needed if Path(p).is_dir()}}
assert all(map(confine._open_to_all, folders)) or confine._make_reachable(folders, Path("/tmp"))
os.setgroups([]); os.setresgid(59999, 59999, 59999); os.setresuid(59999, 59999, 59999)
from envs.host.pipe import _remove_stale_folders
from envs.host.process import EnvProcess, isolation_here
from envs.config.settings import Limits
task = {{"id": "a", "prompt": [{{"role": "user", "content": "q"}}], "answer": None}}
with EnvProcess(Path({folder!r}), limits=Limits(call_seconds=1)) as process:
    print(process.isolation)
    for said in ("a", "!1 / 0", "!import os; os._exit(1)", "!while True: pass", "a"):
        print(process.score(task | {{"answer": [{{"role": "assistant", "content": "a"}}],
                                     "text": ["prompt", "answer"]}}, said)["reward"])
"""


@as_root
@linux
@pytest.mark.timeout(20)
def test_an_ordinary_user_gets_the_floor(obedient: Path):
    for folder in (obedient, *obedient.parents):
        # Whatever of the way there is private to us: one folder deeper when tests run in parallel.
        if folder.name.startswith("pytest-of-") or "pytest-of-" in str(folder.parent):
            folder.chmod(0o755)
    code = USER.format(root=str(ROOT), folder=str(obedient))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=20
    )
    assert done.returncode == 0, done.stderr
    isolation, *rewards = done.stdout.splitlines()
    assert rewards == ["1.0", "0.0", "0.0", "0.0", "1.0"]
    assert "own uid" not in isolation and "memory 2048 MB" in isolation
    level = isolation.partition(":")[0]
    assert ("with the user's own" in isolation) == (level != FULL)
