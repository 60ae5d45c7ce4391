"""Runs calls in threads, beside the caller's own work."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.worker.core import pulse


class BackgroundWorker:
    """A context with threads that run the calls they are given, while the caller goes on. Leaving
    the context waits until the threads have ended."""

    def __init__(self, threads: int = 1, lanes: int = 0) -> None:
        """Make the threads; each starts with its first call.

        Args:
            threads: how many calls run at once; with 1, calls run one after another, in order.
            lanes: number of further threads. Each runs, in order, the calls that name it.
        """
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="environment")
        self._lanes = [ThreadPoolExecutor(1, thread_name_prefix="lane") for _ in range(lanes)]
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "BackgroundWorker":
        """Return this object; its threads start with their first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the calls that are running. Calls that have not begun are dropped: they only
        exist after an error, because `wait` leaves none."""
        executors = (self._threads, *self._lanes)
        for executor in executors:  # all at once, so that none begins another call meanwhile
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in executors:
            executor.shutdown()

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Queue the call `work(*arguments)` for any thread, and return at once."""
        self._pending.append(self._threads.submit(work, *arguments))

    def submit_to(self, lane: int, work: Callable[..., None], *arguments: Any) -> None:
        """Queue the call `work(*arguments)` for one lane, counted from 0, and return at once."""
        self._pending.append(self._lanes[lane].submit(work, *arguments))

    def wait(self) -> float:
        """Wait until all queued calls are done, and return how many seconds that took. If calls
        have failed, raise the exception of the first of them."""
        began = time.monotonic()
        pending = self._pending
        self._pending = []  # now, so that the list is empty even if a call below has failed
        for future in pending:
            future.result()  # raises the call's exception, if it failed
            pulse.beat()  # a sign of life
        return time.monotonic() - began
