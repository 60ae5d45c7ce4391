"""Calls that block, in a thread: they report progress, and end when the client cancels them.

Such a call may take an hour. All other calls share 40 threads, the library's default. Blocking
calls have threads of their own, so that many waits at once do not keep the server from answering.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.lowlevel import RunVar
from mcp.server.mcpserver import Context

from engine.core.reply import Reply
from engine.serving.chat_request import ChatRequest, Heard

_LEAST_PROGRESS = 1e-6  # steps by which each report of a wait exceeds the one before
TOKENS_EVERY_S = 1.0  # between two reports of an answer's tokens
_MOST_HELD = 400  # calls at once; further ones begin when one of them has ended
# The entry of the ASGI scope that is set when the client of a request has closed its connection.
LEFT_IN_SCOPE = "honesmith.left"
_limiter_of_loop: RunVar[anyio.CapacityLimiter] = RunVar("honesmith-held-calls")


class _ClientCancelled(Exception):
    """Ends a wait in its thread after the client has cancelled the call, or has left."""


def asks_for_progress(ctx: Context) -> bool:
    """Whether the client wants progress reports of this call: it then sends a progress token."""
    meta = ctx.request_context.meta
    return meta is not None and meta.get("progress_token") is not None


def _client_left_event(ctx: Context) -> threading.Event:
    """Return the event that is set when the client of a call closes its connection.

    Over stdio the event is never set, since the end of the connection is the end of the server.
    """
    request = ctx.request_context.request  # the HTTP request; None over stdio
    event = None if request is None else request.scope.get(LEFT_IN_SCOPE)
    return event or threading.Event()


async def wait_in_thread(wait: Callable[..., Reply], ctx: Context) -> Reply:
    """Run a blocking wait in a thread, report its progress to the client, and return its reply.

    `wait` takes a function `on_progress`, which it calls with the status of the run. If the client
    cancels the call, this function ends at once, and the thread ends when it next reports progress.
    The thread also ends then if the client has closed its connection: no answer can reach it.
    """
    cancelled = threading.Event()
    client_left = _client_left_event(ctx)
    last_reported = -_LEAST_PROGRESS  # the last progress that was reported

    def on_progress(status: Reply) -> None:
        """Report the step of the run to the client. Raises _ClientCancelled, which ends the wait,
        if the client has cancelled the call or closed its connection."""
        nonlocal last_reported
        if cancelled.is_set() or client_left.is_set():
            raise _ClientCancelled
        # The protocol demands that each report is larger than the one before. A report is sent even
        # if no step was done, because it shows the client that the call is alive.
        last_reported = max(float(status.get("step") or 0), last_reported + _LEAST_PROGRESS)
        total_steps = status.get("total_steps")
        total = float(total_steps) if total_steps else None  # None: not known yet
        anyio.from_thread.run(ctx.report_progress, last_reported, total, _progress_line(status))

    return await _in_thread(partial(wait, on_progress=on_progress), cancelled)


async def answer_in_thread(chat: Callable[..., Reply], request: ChatRequest, ctx: Context) -> Reply:
    """Run a blocking chat in a thread, report its tokens to the client, and return its reply.

    `chat` takes a function `listener` and calls it with each new piece of an answer. If the client
    cancels the call, this function ends at once, and the sampling ends with the next token.
    """
    cancelled = threading.Event()
    report = _TokenReport(request, ctx, cancelled)
    return await _in_thread(partial(chat, listener=report.hear), cancelled)


class _TokenReport:
    """Tells the client how many tokens were sampled so far, every `TOKENS_EVERY_S` seconds.
    `cancelled` is set when the client has cancelled the call."""

    def __init__(self, request: ChatRequest, ctx: Context, cancelled: threading.Event) -> None:
        """Start with no tokens counted; the first report comes `TOKENS_EVERY_S` seconds from now.

        Args:
            request: the chat; with `compare_to` two models answer, each with up to `max_tokens`.
            ctx: the call whose client gets the progress.
            cancelled: set when the client has cancelled the call.
        """
        self._ctx = ctx
        self._cancelled = cancelled
        self._counts: dict[str, int] = {}  # tokens sampled so far, by model
        model_count = 2 if request.compare_to else 1
        self._max_tokens = request.max_tokens * model_count
        self._reported_at = time.monotonic()

    def hear(self, piece: Heard) -> None:
        """Take the next piece of an answer, and report the tokens of all answers so far to the
        client.

        Nothing is reported within `TOKENS_EVERY_S` seconds of the last report. Raises
        _ClientCancelled if the client has cancelled the call.
        """
        if self._cancelled.is_set():
            raise _ClientCancelled  # it passes through the engine, which then stops sampling
        self._counts[piece.model] = piece.tokens
        now = time.monotonic()
        if now - self._reported_at < TOKENS_EVERY_S:
            return
        self._reported_at = now
        # A model that is still busy with other answers has not begun with this one.
        state = "is busy with others" if piece.is_waiting else f"{piece.tokens} tokens"
        anyio.from_thread.run(
            self._ctx.report_progress,
            float(sum(self._counts.values())),
            float(self._max_tokens),
            f"{piece.model}: {state}",
        )


async def _in_thread(call: Callable[[], Reply], cancelled: threading.Event) -> Reply:
    """Run a blocking call in a thread and return its reply.

    If the client cancels the call, `cancelled` is set, which tells the thread to end, and this
    function ends at once without waiting for the thread.
    """
    try:
        return await anyio.to_thread.run_sync(
            call, abandon_on_cancel=True, limiter=_held_calls_limiter()
        )
    except anyio.get_cancelled_exc_class():
        cancelled.set()
        raise


def _held_calls_limiter() -> anyio.CapacityLimiter:
    """Return the limiter that lets at most `_MOST_HELD` blocking calls run at once.

    A limiter belongs to one event loop, so the running loop gets its own at the first call.
    """
    limiter = _limiter_of_loop.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(_MOST_HELD)
        _limiter_of_loop.set(limiter)
    return limiter


def _progress_line(status: Reply) -> str:
    """Return the status of a run as one line: "running, step 3/60, about 40 s left"."""
    parts = []
    if status.get("state"):
        parts.append(str(status["state"]))
    if status.get("total_steps"):
        parts.append(f"step {status.get('step') or 0}/{status['total_steps']}")
    if status.get("now"):  # only plans have this: the run of the plan that is under way
        parts.append(str(status["now"]))
    if status.get("percent") is not None:
        phase = f"{status['phase']} " if status.get("phase") else ""
        parts.append(f"{phase}{status['percent']:.0f} %")
    if status.get("stalled"):
        parts.append("stalled")
    if status.get("eta_s") is not None:
        parts.append(f"about {float(status['eta_s']):.0f} s left")
    return ", ".join(parts)
