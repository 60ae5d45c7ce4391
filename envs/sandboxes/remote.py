"""A sandbox that is somewhere else and reached by running a shell in it.

A provider's class runs one command line and writes one file; everything else is done with those, in
POSIX shell. An agent that is root in its sandbox can change the shell itself: what is read back is
no safer than the task's own image.
"""

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from envs.json_types import JsonObject
from envs.sandboxes.contract import KEPT_BYTES, Order, Ran, SandboxFault

SHELL_SECONDS = 60.0  # for a command line of our own
SPARE_SECONDS = 15.0  # by which the provider's time limit is longer than that inside
MISSING, NO_FILE, TOO_LARGE = 44, 45, 46  # exit statuses of _READ
NOT_RUN = 126  # of a command that no shell can be given
# Of a command line, quoted once more: Linux takes arguments of up to 128 KiB.
LONGEST = 120 << 10
KILLED = 137  # of a command that `timeout` ended

# Output goes to files, so that what a command leaves in the background holds nothing up.
_RUN = """
d=$(mktemp -d) || exit 1
timeout -s KILL {seconds:g} bash -c {command} >"$d/o" 2>"$d/e" </dev/null
s=$?
show() {{
  n=$(wc -c <"$1")
  if [ "$n" -le {most} ]; then cat "$1"; else
    head -c {half} "$1"
    echo; echo "... $((n - {most})) bytes are left out ..."
    tail -c {half} "$1"
  fi
}}
show "$d/o"; show "$d/e" >&2
rm -rf "$d"
exit $s
"""
_READ = """
f={path}
[ -e "$f" ] || [ -L "$f" ] || exit 44
[ -f "$f" ] && [ ! -L "$f" ] || exit 45
[ "$(wc -c <"$f")" -le {most} ] || exit 46
cat "$f"
"""
_REMOVE = """
f={path}
if [ -d "$f" ] && [ ! -L "$f" ]; then find "$f" -mindepth 1 -delete; else rm -f "$f"; fi
"""
# Builtins alone, so that no process is started. /proc/N/stat is "pid (name) state parent ... flags
# (7th after the name) ... threads (18th) ... start (20th)". A name may hold lines and ") " of its
# own, so the text is joined before it is cut, at the last ") ": what follows that is the kernel's.
_LOOK = """
LC_ALL=C
look() {
  all=; { while read -r line || [ -n "$line" ]; do all="$all $line"; done <"$1/stat"; } 2>/dev/null
  said=${all##*") "}
  [ -n "$said" ]
}
"""
_LIST = (
    _LOOK
    + """
for p in /proc/[0-9]*; do
  look "$p" || continue
  set -- $said
  printf '%s:%s ' "${p#/proc/}" "${20}"
done
"""
)
# Where the first thread of a process has ended and others live, the process is a Z too.
_SWEEP = (
    _LOOK
    + """
known=" KNOWN "
own=" "; p=$$
while [ "$p" -gt 0 ] 2>/dev/null; do
  own="$own$p "
  look "/proc/$p" || break
  set -- $said
  p=$2
done
round=0
while [ $round -lt 300 ]; do
  round=$((round + 1)); left=0
  for p in /proc/[0-9]*; do
    look "$p" || continue
    set -- $said
    pid=${p#/proc/}
    case "$own" in *" $pid "*) continue;; esac
    case "$known" in *" $pid:${20} "*) continue;; esac
    [ "$1" = Z ] && [ "${18}" -le 1 ] && continue
    [ $(($7 & 2097152)) -ne 0 ] && continue
    kill -KILL "$pid" 2>/dev/null; left=1
  done
  [ $left -eq 0 ] && exit 0
  [ $round -lt 200 ] || sleep 0.1  # much memory takes a while to go
done
exit 1
"""
)


@dataclass
class RemoteSandbox:
    """A sandbox of a provider, for one rollout.

    Attributes:
        order: what the task needs.
        run: runs a command line by `sh`, at most so many seconds, with these variables. Raises
            SandboxFault.
        upload: writes a file at an absolute path whose folder exists. Raises SandboxFault.
        give_back: ends the sandbox at the provider. Raises SandboxFault.
        name: what the provider calls it.
        workdir: the folder in which commands run.
        known: the processes that it had before any command, "pid:start" each.
    """

    order: Order
    run: Callable[[str, float, Mapping[str, str]], Ran]
    upload: Callable[[str, bytes], None]
    give_back: Callable[[], None]
    name: str = ""
    workdir: str = field(default="", init=False)
    known: str = field(default="", init=False)
    closed: bool = field(default=False, init=False)

    def prepare(self) -> None:
        """Make the folders of a task, and note which processes are there before any command.
        Called by `opening`, before anything else. Raises SandboxFault."""
        folder = shlex.quote(self.order.workdir or ".")
        text = f"mkdir -p {folder} /logs/agent /logs/verifier && command -v bash >/dev/null"
        ran = self._shell(
            f"{text} && command -v timeout >/dev/null && cd {folder} && pwd", "prepared"
        )
        self.workdir = ran.stdout.strip()
        self.known = self._shell(_LIST, "looked at").stdout.strip()

    def exec(
        self, command: str, seconds: float, variables: Mapping[str, str], grading: bool
    ) -> Ran:
        """Run a command by bash in the working folder. One that no shell can be given, whichever
        the provider, ends with NOT_RUN and says why."""
        half = KEPT_BYTES // 2
        text = _RUN.format(seconds=seconds, command=shlex.quote(command), most=2 * half, half=half)
        text = f"cd {shlex.quote(self.workdir)} && {{ {text}\n}}"
        fault = _unfit(text)
        if fault:
            return Ran(NOT_RUN, "", f"the command was not run: {fault}\n")
        variables = {**self.order.variables, **variables}
        began = time.monotonic()
        ran = self.run(text, seconds + SPARE_SECONDS, variables)
        # What has too little memory is killed too, but sooner.
        timed_out = ran.status == KILLED and time.monotonic() - began >= seconds
        return Ran(ran.status, ran.stdout, ran.stderr, timed_out)

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and make its folder."""
        folder = shlex.quote(path.rpartition("/")[0] or "/")
        self._shell(f"mkdir -p {folder} && rm -rf {shlex.quote(path)}", "prepared for a file")
        self.upload(path, data)

    def read(self, path: str, most: int) -> bytes | None:
        """Return a regular file that is no link; None if there is none."""
        ran = self._asked(_READ.format(path=shlex.quote(path), most=most))
        if ran.status == MISSING:
            return None
        if ran.status in (NO_FILE, TOO_LARGE):
            reason = "no regular file" if ran.status == NO_FILE else f"above {most:,} bytes"
            raise SandboxFault(f"{path} is {reason}")
        if ran.status != 0:
            raise SandboxFault(f"{path} cannot be read: {ran.stderr or ran.stdout}"[:300])
        return ran.stdout.encode()

    def remove(self, path: str) -> None:
        """Remove a file, or all that is in a folder, which may be a mount."""
        self._shell(_REMOVE.format(path=shlex.quote(path)), f"cleared of {path}")

    def end_processes(self) -> None:
        """Kill every process that was not there before the first command, until none is left."""
        ran = self.run(_SWEEP.replace("KNOWN", self.known), SHELL_SECONDS, {})
        if ran.status != 0:
            raise SandboxFault("a process of the agent could not be ended, so nothing is graded")

    def close(self) -> None:
        """Give the sandbox back; once."""
        if not self.closed:
            self.give_back()
            self.closed = True

    def _asked(self, text: str) -> Ran:
        """Run a command line of our own. Raises SandboxFault, also where a path in it cannot be
        passed to a shell."""
        fault = _unfit(text)
        if fault:
            raise SandboxFault(f"a command line of ours cannot be passed: {fault}")
        return self.run(text, SHELL_SECONDS, {})

    def _shell(self, text: str, done: str) -> Ran:
        """Run a command line of our own. Raises SandboxFault if it fails; `done` says in its
        message what the sandbox could not be."""
        ran = self._asked(text)
        if ran.status != 0:
            output = (ran.stderr or ran.stdout).strip()[-200:]
            raise SandboxFault(f"the sandbox could not be {done} (status {ran.status}): {output}")
        return ran


def _unfit(text: str) -> str:
    """Return why a command line cannot be passed to a shell; "" if it can."""
    if "\0" in text:
        return "it has a NUL character"
    try:
        size = len(shlex.quote(text).encode())
    except UnicodeEncodeError:
        return "it has half a surrogate pair, which is no UTF-8"
    return "it is too long; write it in parts" if size > LONGEST else ""


def text_option(options: JsonObject, name: str, default: str = "") -> str:
    """Return an option of [adapter.sandbox] that is a text."""
    value = options.get(name, default)
    return value if isinstance(value, str) else default
