"""A real Slurm of one node on loopback, with its own key, ports, folders and daemons.

munged, slurmctld and slurmd are child processes with a configuration of their own in a temporary
folder; they are ended by their process ids, as is each step daemon of a job. No cgroups: a job's
processes are known by their parents. Debian: `apt-get install --no-install-recommends slurmctld
slurmd slurm-client munge`; none of their services needs to run.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
_PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_MISSING = [name for name in PROGRAMS if shutil.which(name, path=_PLACES) is None]
WHY_NOT = (
    f"no Slurm here: {', '.join(_MISSING)}"
    if _MISSING
    else ("" if os.geteuid() == 0 else "slurmd starts jobs only as root")
)
# What stands in for the devices of two GPUs: nothing is read of them.
GPU_FILES = ("/dev/zero", "/dev/null")


class LoopbackSlurm:
    """One node, on which `variables` lets the commands of Slurm act.

    Attributes:
        folder: everything of it; short, because it holds sockets.
        variables: of the environment, for whoever calls the commands.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hs-slurm-"))
        self.folder.chmod(0o755)
        self.ports = [_free_port() for _ in range(2)]
        for name in ("state", "spool", "log", "munge"):
            (self.folder / name).mkdir(mode=0o755)
        self.variables: Mapping[str, str] = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._write_config()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start_munge()
            self.start("slurmctld")
            self.start("slurmd")
            self.until(lambda: "idle" in self.call("sinfo", "-h", "-o", "%T"), "the node is idle")
        except BaseException:
            self.close()
            raise

    def _write_config(self) -> None:
        """Write slurm.conf and gres.conf."""
        host, folder = socket.gethostname().partition(".")[0], self.folder
        (folder / "gres.conf").write_text(
            "".join(f"NodeName={host} Name=gpu File={file}\n" for file in GPU_FILES)
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        lines = [
            "ClusterName=loopback",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={self.ports[0]}",
            f"SlurmdPort={self.ports[1]}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={folder}/munge/socket",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld",
            f"SlurmdLogFile={folder}/log/slurmd",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0",
            "MpiDefault=none",
            "ReturnToService=2",
            "SlurmctldTimeout=10",
            "SlurmdTimeout=20",
            "KillWait=5",
            "MinJobAge=300",
            "InactiveLimit=0",
            "MessageTimeout=10",
            "GresTypes=gpu",
            f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=2000 "
            f"Gres=gpu:{len(GPU_FILES)} State=UNKNOWN",
            f"PartitionName=short Nodes={host} Default=YES MaxTime=24:00:00 State=UP "
            "OverSubscribe=FORCE:4",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start_munge(self) -> None:
        """Start the daemon that signs for users."""
        munge = self.folder / "munge"
        self._daemons["munged"] = self._spawn(
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge}/socket",
            f"--key-file={munge}/key",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
            "--num-threads=2",
        )
        self.until(lambda: (munge / "socket").exists(), "munged listens")

    def start(self, name: str) -> None:
        """Start "slurmctld" or "slurmd"."""
        self._daemons[name] = self._spawn(name, "-D", "-f", str(self.folder / "slurm.conf"))
        if name == "slurmctld":
            self.until(lambda: "UP" in self.call("scontrol", "ping"), "the controller answers")

    def kill(self, name: str) -> None:
        """End one daemon at once, as a crash does."""
        process = self._daemons.pop(name)
        process.kill()
        process.wait(10)

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a daemon as a child of this process."""
        program = shutil.which(name, path=_PLACES)
        assert program is not None
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            return subprocess.Popen(
                [program, *arguments],
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def call(self, *command: str) -> str:
        """What a command of Slurm prints; "" where it fails."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout if done.returncode == 0 else ""

    def until(self, holds: Callable[[], object], what: str, seconds: float = 30.0) -> None:
        """Poll until something holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                log = (self.folder / "log" / "slurmctld").read_text(errors="replace")[-2000:]
                raise AssertionError(f"waited {seconds} s until {what}\n{log}")
            time.sleep(0.05)

    def close(self) -> None:
        """End everything: jobs and their processes, the daemons, the folder."""
        if "slurmctld" in self._daemons:
            self.call("scancel", "--full", "--user=root", "--signal=KILL")
        jobs = self.of_jobs()
        for process in self._daemons.values():
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        for process in {*jobs, *self.of_jobs()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def of_jobs(self) -> list[psutil.Process]:
        """The step daemons of this node, which outlive slurmd, and what they started."""
        processes: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.name() != "slurmstepd":
                    continue
                # Each listens on a socket in the folder of its slurmd.
                sockets = [str(each.laddr) for each in process.net_connections(kind="unix")]
                if any(path.startswith(f"{self.folder}/") for path in sockets):
                    processes += [process, *process.children(recursive=True)]
        return processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
