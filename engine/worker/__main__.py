"""Runs one run in one process: `python -P -m engine.worker RUN_FOLDER`.

The exit status is 0 if the run is done (result.json), 3 if it failed (failure.json), or 4 if it was
stopped on request with a checkpoint.
"""

import faulthandler
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.worker.core.runtime import prepare

prepare()

from engine.evidence.verdict.provenance import seal
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.worker.components import quiet_libraries
from engine.worker.core import pulse
from engine.worker.core.failures import explain
from engine.worker.core.job import Job, Result, Stopped
from engine.worker.distill import train as train_distill
from engine.worker.dpo import train as train_dpo
from engine.worker.evaluate import evaluate, probe, search_prompt
from engine.worker.grpo import train as train_grpo
from engine.worker.sft import train as train_sft

DONE, FAILED, STOPPED = 0, 3, 4

# The loops by the algorithm in a run's config; each takes a job with that kind of config.
LOOPS: dict[str, Callable[[Job[Any]], Result]] = {
    "sft": train_sft,
    "dpo": train_dpo,
    "grpo": train_grpo,
    "distill": train_distill,
    "prompt": search_prompt,
    "evaluate": evaluate,
    "probe": probe,
}


def main(folder: Path) -> int:
    """Run the job in `folder` to its end and write its result, or why it failed.

    Returns the exit status: DONE, FAILED or STOPPED.
    """
    quiet_libraries()
    job: Job[Any] = Job(folder)
    job.listen()  # from now on a signal can stop the job
    # On SIGUSR1, which a silent worker gets before it is ended, the console shows what every thread
    # is doing.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pulse.begin(job.run)
    mark_running(job.run)
    try:
        result = LOOPS[job.config.algorithm](job)
    except Stopped:
        job.event("stopped", "stopped on request")
        return STOPPED
    except Exception as error:  # noqa: BLE001 - the top of the process: every failure is a row
        traceback.print_exc()
        failure = explain(error)
        job.fail(failure)
        job.event("failed", failure.message, kind=failure.kind)
        return FAILED
    with pulse.phase("finishing"):
        job.finish(result)
        seal(job.run)  # records hashes of all files that the result rests on
    return DONE


def mark_running(run: RunDir) -> None:
    """Set the run's state from preparing to running. Any other state is kept, such as that of a run
    that was cancelled in the meantime."""
    with Store(run.home) as store:
        store.set_state(run.id, "running", only_from={"preparing"}, started=time.time())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
