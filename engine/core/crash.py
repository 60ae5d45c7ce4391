"""Where a test may end a process: labelled points that cost nothing unless one is asked for.

`HONESMITH_CRASH_AT="checkpoint.aside:2"` kills the process (SIGKILL, as a lost machine would) the
second time it passes that label; without a number, the first time.
"""

import os
import signal

POINTS = (
    # whoever submits
    "submit.folder",  # the run's folder is made, nothing is in it
    "submit.config",  # its files are durable, no row yet
    "submit.inserted",  # the row is written, not committed
    "submit.committed",  # the run exists, nobody was told
    # whoever starts what is queued
    "lease.claimed",  # the lock is taken inside the transaction
    "lease.leased",  # the row is preparing, no supervisor yet
    "lease.started",  # the supervisor is started
    # the supervisor
    "supervise.began",  # before it spawns the trainer
    "supervise.spawned",  # the trainer lives, started.json is not written
    "supervise.exited",  # the trainer has ended, exit.json is not written
    "supervise.recorded",  # exit.json is written, the row is not
    "supervise.applied",  # the row is final, the report is not written
    # the trainer
    "train.running",  # the row is running, nothing is loaded
    "train.rewound",  # metrics after the checkpoint are forgotten
    "step.updated",  # the weights have changed, no metrics yet
    "step.logged",  # the metrics line is written
    "checkpoint.aside",  # files are written, without a manifest
    "checkpoint.manifest",  # complete, not yet in its place
    "checkpoint.renamed",  # in its place, nothing tidied
    "checkpoint.pruning",  # an old one is half deleted
    "checkpoint.best",  # before `best` points at it
    "finish.examined",  # the last exam is over, no result yet
    "finish.result",  # result.json is written, the seal is not
    "finish.sealed",  # nothing is left but to exit
)

_LABEL, _, _number = os.environ.get("HONESMITH_CRASH_AT", "").partition(":")
_left = int(_number) if _number.isdigit() else 1


def point(label: str) -> None:
    """Ends this process if the environment named `label` and this is the passage it asked for."""
    if label == _LABEL:
        _count_down()


def _count_down() -> None:
    global _left
    _left -= 1
    if _left <= 0:
        os.write(2, f"crash point {_LABEL}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
