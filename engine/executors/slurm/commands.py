"""The commands of Slurm, called on a login node, and their answers read.

Only what Slurm has had since release 20.02 is used. No answer is taken for a failure of a job: a
controller that does not answer raises `SlurmDown`.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_LIMIT_S = 90.0  # for one command; clients of Slurm themselves give up after seconds
# What a client prints when the controller, or its database, cannot be asked.
_DOWN = re.compile(
    r"unable to contact slurm controller|connect failure|connection refused|timed out|zero bytes"
    r"|communication (connection )?failure|unable to establish|slurm backup controller in standby"
    r"|protocol authentication error|munge encode failed|socket timed out|temporarily unable"
    r"|persistent conn|not responding|resolution failure",
    re.IGNORECASE,
)
# Variables of a session inside another job, or of a user's habits, that would change a submission.
_NOT_PASSED_ON = re.compile(r"SLURM_(?!CONF$).*|SBATCH_.*|SALLOC_.*|SQUEUE_.*|SACCT_.*|TMPDIR")

Kind = Literal["waiting", "running", "ended"]
_WAITING = frozenset(
    "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split()
)
_RUNNING = frozenset(
    "RUNNING COMPLETING SUSPENDED STOPPED RESIZING SIGNALING STAGE_OUT EXPEDITING".split()
)
_FORMAT = "%i|%T|%r|%S|%N|%j"  # of squeue: id, state, reason, start, nodes, name


class SlurmDown(Exception):
    """The controller does not answer: nothing is known of any job."""

    code = "SLURM_DOWN"


class SlurmRefused(Exception):
    """Slurm does not take a command; its words say why."""

    code = "SLURM_REFUSED"


@dataclass(frozen=True)
class Job:
    """A job as Slurm shows it.

    Attributes:
        id: its number.
        state: in Slurm's words, such as "PENDING" or "NODE_FAIL".
        reason: why it waits or ended so, such as "Priority"; "" for none.
        start: when it started or is expected to, as Slurm writes times; "" where that is not known.
        node: where it runs; "" where it does not.
        name: as it was submitted; "" where it was not asked for.
    """

    id: str
    state: str
    reason: str = ""
    start: str = ""
    node: str = ""
    name: str = ""

    @property
    def kind(self) -> Kind:
        """Whether it waits, runs or has ended; a word of a later release counts as ended only
        where it does not wait or run in squeue."""
        if self.state in _WAITING:
            return "waiting"
        return "running" if self.state in _RUNNING else "ended"


def submit(script: str, options: Sequence[str]) -> str:
    """Submit a batch script; returns the job's id. Raises SlurmDown or SlurmRefused."""
    answer = _call("sbatch", "--parsable", *options, stdin=script)
    job_id = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
    if not job_id.isdigit():
        raise SlurmRefused(f"sbatch answered {answer[:200]!r} and no job id")
    return job_id


def expected_start(script: str, options: Sequence[str]) -> str:
    """When a job with these options would start, in sbatch's own words; nothing is submitted.

    Raises SlurmDown, or SlurmRefused where it could never start.
    """
    return read_expected_start(_call("sbatch", "--test-only", *options, stdin=script, error=True))


def read_expected_start(printed: str) -> str:
    """The time and the nodes in what `sbatch --test-only` printed: "2026-11-28T13:40:05 on n1"."""
    match = re.search(r"to start at (\S+)(?: .*? on nodes? (\S+))?", printed)
    if match is None:
        return ""
    return f"{match[1]} on {match[2]}" if match[2] else match[1]


def named(names: Sequence[str] = ()) -> list[Job]:
    """This user's jobs with these names, all of them without names; an ended job is listed for some
    minutes. Raises SlurmDown."""
    options = [f"--name={','.join(names)}"] if names else []
    user = f"--user={os.geteuid()}"
    printed = _call("squeue", "--noheader", user, "--states=all", f"--format={_FORMAT}", *options)
    return read_queue(printed)


def read_queue(printed: str) -> list[Job]:
    """The jobs in what squeue printed in `_FORMAT`, the newest last."""
    jobs = []
    for line in printed.splitlines():
        parts = line.strip().split("|")
        if len(parts) < 6 or not parts[0].isdigit():
            continue
        job_id, state, reason, start, node = parts[:5]
        known = {"reason": reason, "start": start, "node": node}
        kept = {key: text for key, text in known.items() if text not in ("None", "N/A", "(null)")}
        jobs.append(Job(job_id, state, **kept, name="|".join(parts[5:])))
    return sorted(jobs, key=lambda job: int(job.id))


def ended(job_id: str) -> Job | None:
    """A job that squeue lists no more, from what the cluster keeps of ended ones; None where it
    keeps nothing of it. Raises SlurmDown."""
    try:
        printed = _call("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "JobID,State,Reason")
    except (SlurmRefused, FileNotFoundError):  # a cluster without accounting
        return None
    return read_account(printed)


def read_account(printed: str) -> Job | None:
    """The last job in what `sacct -n -P -o JobID,State,Reason` printed; None for no job."""
    job = None
    for line in printed.splitlines():
        job_id, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if job_id.isdigit() and state:
            # Such as "CANCELLED by 1000", and "CANCELLED+" in a narrow column.
            word = state.split()[0].rstrip("+")
            job = Job(job_id, word, "" if reason == "None" else reason)
    return job


def cancel(job_id: str, *, signal: str = "") -> None:
    """End a job, or with `signal` send that to its own program alone. Again changes nothing.

    Raises SlurmDown.
    """
    options = ["--batch", f"--signal={signal}"] if signal else []
    try:
        _call("scancel", *options, job_id)
    except SlurmRefused:  # it has ended
        return


def _call(program: str, *arguments: str, stdin: str = "", error: bool = False) -> str:
    """Run a command of Slurm and return what it printed, on its error channel too with `error`.

    Raises SlurmDown, SlurmRefused, or FileNotFoundError where it is not installed.
    """
    try:
        done = subprocess.run(
            [program, *arguments],
            input=stdin,
            env=clean_variables(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as timeout:
        raise SlurmDown(f"{program} did not answer within {_LIMIT_S:.0f} s") from timeout
    if done.returncode == 0:
        return done.stdout + (done.stderr if error else "")
    words = " ".join(f"{done.stderr} {done.stdout}".split())[-500:]
    if _DOWN.search(words):
        raise SlurmDown(f"{program}: {words}")
    raise SlurmRefused(f"{program}: {words or f'status {done.returncode}'}")


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a command of Slurm gets, and that a job inherits."""
    return {name: text for name, text in variables.items() if not _NOT_PASSED_ON.fullmatch(name)}
