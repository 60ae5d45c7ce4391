"""Work that is done beside the caller's own, in a thread."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.worker.core import pulse


class BackgroundWorker:
    """A context with a thread that runs the calls it is given, one after another, while the caller
    goes on. Leaving the context waits for the thread to end."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="environment")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "BackgroundWorker":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the call that is running. Calls that have not begun are dropped: after an error
        nobody needs them, and otherwise `wait` has left none."""
        self._thread.shutdown(cancel_futures=True)

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Queue the call `work(*arguments)` for the thread, and return at once."""
        self._pending.append(self._thread.submit(work, *arguments))

    def wait(self) -> float:
        """Wait until all queued calls are done, and return the seconds that took. If calls have
        failed, raises the exception of the first of them."""
        began = time.monotonic()
        pending = self._pending
        self._pending = []  # also if one of the calls has failed
        for future in pending:
            future.result()
            pulse.beat()
        return time.monotonic() - began
