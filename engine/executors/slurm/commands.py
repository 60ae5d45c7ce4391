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
_MESSAGE_CHARS = 500  # how much an error quotes of what a command printed
_NOTHING = ("None", "N/A", "(null)")  # how squeue writes that it has nothing to say
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
        """Whether the job waits, runs or has ended. A state that is not known here, such as one of
        a later release of Slurm, counts as ended."""
        if self.state in _WAITING:
            return "waiting"
        return "running" if self.state in _RUNNING else "ended"


def submit(script: str, options: Sequence[str]) -> str:
    """Submit a batch script with these options of sbatch; return the job's id. Raises SlurmDown or
    SlurmRefused."""
    answer = _call("sbatch", "--parsable", *options, stdin=script)
    lines = answer.strip().splitlines() or [""]
    job_id = lines[-1].partition(";")[0]  # the last line is ID or ID;CLUSTER
    if not job_id.isdigit():
        raise SlurmRefused(f"sbatch answered {answer[:200]!r} and no job id")
    return job_id


def expected_start(script: str, options: Sequence[str]) -> str:
    """Ask Slurm when a job with these options of sbatch would start. Nothing is submitted.

    Returns a text such as "2026-11-28T13:40:05 on n1"; "" if Slurm does not say. Raises SlurmDown,
    or SlurmRefused if such a job could never start.
    """
    printed = _call("sbatch", "--test-only", *options, stdin=script, with_stderr=True)
    return read_expected_start(printed)


def read_expected_start(printed: str) -> str:
    """Return the time and the nodes in what `sbatch --test-only` printed, such as
    "2026-11-28T13:40:05 on n1"; "" if it names no time."""
    match = re.search(r"to start at (\S+)(?: .*? on nodes? (\S+))?", printed)
    if match is None:
        return ""
    return f"{match[1]} on {match[2]}" if match[2] else match[1]


def named(names: Sequence[str] = ()) -> list[Job]:
    """List this user's jobs that have one of these names, the newest last; without names all jobs
    of this user. Slurm still lists an ended job for some minutes. Raises SlurmDown."""
    options = [f"--name={','.join(names)}"] if names else []
    user = f"--user={os.geteuid()}"
    printed = _call("squeue", "--noheader", user, "--states=all", f"--format={_FORMAT}", *options)
    return read_queue(printed)


def read_queue(printed: str) -> list[Job]:
    """Return the jobs in what squeue printed in `_FORMAT`, the newest last. Lines in another form
    are skipped."""
    jobs = []
    for line in printed.splitlines():
        parts = line.strip().split("|")
        if len(parts) < 6 or not parts[0].isdigit():
            continue
        job_id, state, reason, start, node = parts[:5]
        name = "|".join(parts[5:])  # the last field: a name may have the separator in it
        facts = {"reason": reason, "start": start, "node": node}
        known = {key: text for key, text in facts.items() if text not in _NOTHING}
        jobs.append(Job(job_id, state, **known, name=name))
    return sorted(jobs, key=lambda job: int(job.id))


def ended(job_id: str) -> Job | None:
    """Return a job that squeue no longer lists, from the cluster's accounting; None if that keeps
    nothing of it, or the cluster has none. Raises SlurmDown."""
    try:
        printed = _call("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "JobID,State,Reason")
    except (SlurmRefused, FileNotFoundError):  # a cluster without accounting
        return None
    return read_account(printed)


def read_account(printed: str) -> Job | None:
    """Return the last job in what `sacct -n -P -o JobID,State,Reason` printed; None if there is
    none."""
    job = None
    for line in printed.splitlines():
        job_id, _, state_and_reason = line.strip().partition("|")
        state, _, reason = state_and_reason.partition("|")
        if job_id.isdigit() and state:
            # A state may be "CANCELLED by 1000", or "CANCELLED+" in a narrow column.
            first_word = state.split()[0].rstrip("+")
            job = Job(job_id, first_word, "" if reason == "None" else reason)
    return job


def cancel(job_id: str, *, signal: str = "") -> None:
    """End a job; or, with the name of a `signal` such as "TERM", only send that to the job's own
    program. Nothing happens to a job that has ended. Raises SlurmDown."""
    options = ["--batch", f"--signal={signal}"] if signal else []
    try:
        _call("scancel", *options, job_id)
    except SlurmRefused:  # it has ended
        return


def _call(program: str, *arguments: str, stdin: str = "", with_stderr: bool = False) -> str:
    """Run a command of Slurm and return what it printed on stdout, and on stderr if `with_stderr`.

    Raises SlurmDown if the controller does not answer, SlurmRefused if the command fails for
    another reason, FileNotFoundError if the command is not installed.
    """
    try:
        process = subprocess.run(
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
    if process.returncode == 0:
        return process.stdout + process.stderr if with_stderr else process.stdout
    # In one line, and only the end of it.
    messages = " ".join(f"{process.stderr} {process.stdout}".split())[-_MESSAGE_CHARS:]
    if _DOWN.search(messages):
        raise SlurmDown(f"{program}: {messages}")
    raise SlurmRefused(f"{program}: {messages or f'status {process.returncode}'}")


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those environment variables that a command of Slurm gets, and that a job inherits:
    none that would change what is submitted, such as SBATCH_PARTITION."""
    return {name: text for name, text in variables.items() if not _NOT_PASSED_ON.fullmatch(name)}
