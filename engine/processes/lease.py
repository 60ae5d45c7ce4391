"""The lease of a run that another machine started here: without a word from it the run ends.

Whoever looks after the run from afar renews the file `lease.json` of its folder. The run's
supervisor measures the silence on its own clock, and at its end lets the trainer save and stop. A
run without that file, as every run that was started on this machine, has no lease.
"""

import time
from dataclasses import dataclass, field

from engine.core.files import read_object, write_json
from engine.core.format import words
from engine.home.run_dir import RunDir
from engine.processes.limits import Limit


def renew(run: RunDir, seconds: float) -> None:
    """Say that somebody still wants the run, for `seconds` from now on."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.far("lease"), {"seconds": seconds, "time": time.time()})


@dataclass
class LeaseWatch:
    """Measures how long nobody has renewed the lease of a run. Times are monotonic."""

    run: RunDir
    renewed_at: float = field(default_factory=time.monotonic)
    content: object = None

    def limit(self, elapsed_s: float) -> Limit | None:
        """Return the limit at which the run's lease ends, or None for a run without a lease. A run
        that another machine started has a lease: the time that it may go on without word from that
        machine. Each word renews it.

        The limit is in seconds from the start of the attempt; `elapsed_s` is the present time so
        counted.
        """
        content = read_object(self.run.far("lease"))
        seconds = content.get("seconds")
        if not isinstance(seconds, int | float):
            return None
        now = time.monotonic()
        if content != self.content:
            self.content, self.renewed_at = content, now
        reason = f"the machine that started it gave no word for {words(seconds / 3600)}"
        return Limit(elapsed_s - (now - self.renewed_at) + seconds, "lease", reason)
