"""One HTTP server for each rollout. It answers only on the socket that this rollout's program can
reach, only to this rollout's key, and only as long as the rollout lasts.

All servers run in one thread. A question waits there until the batch that contains it was sampled.
"""

import asyncio
import hmac
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.core.slow_clients import ImpatientProtocol
from engine.worker.core.trajectory import Completion
from engine.worker.gateway import anthropic_messages, openai_chat, openai_responses
from engine.worker.gateway.asked import Answer, Dialect
from engine.worker.gateway.batcher import Batcher
from engine.worker.gateway.chat_request import Refused
from engine.worker.gateway.http_parts import (
    BEAT_S,
    ImpatientStream,
    body_of,
    is_bearer_of,
    problem,
    refusal_of_place,
)
from engine.worker.gateway.session import Session, Turn

MODEL = "policy"  # the name of the model in replies to a program
MAX_CONNECTIONS = 32  # at once, from one program
MAX_HEADERS = 64 * 1024  # bytes
_STOP_S = 5.0  # how long the thread may take to end
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": openai_chat,
    "/v1/messages": anthropic_messages,
    "/v1/responses": openai_responses,
}

Handler = Callable[[Request], Awaitable[Response]]


class RolloutServer:
    """The routes of one rollout."""

    def __init__(self, session: Session, batcher: Batcher, key: str) -> None:
        """Serve one rollout.

        Args:
            session: records the questions and answers.
            batcher: has the questions sampled.
            key: the only key that is accepted, as a bearer token or in `x-api-key`.
        """
        self.session = session
        self.batcher = batcher
        self.key = key.encode()

    def app(self) -> Starlette:
        """Make the application with all routes: the list of models, and one route for each protocol
        in which a program may ask the model."""
        routes = [Route("/v1/models", self.guarded(self.models))]
        for path, dialect in _DIALECTS.items():
            routes.append(
                Route(path, self.guarded(self.question_handler(dialect)), methods=["POST"])
            )
        return Starlette(routes=routes)

    def guarded(self, handler: Handler) -> Handler:
        """Wrap `handler` so that it answers only this rollout's program, and a `Refused` becomes an
        error response."""

        async def check_and_handle(request: Request) -> Response:
            """Answer a request from this machine that has the rollout's key, as a bearer token or
            in x-api-key. Any other request gets 401 or another error."""
            refusal = refusal_of_place(request)
            if refusal is not None:
                return refusal
            x_api_key = request.headers.get("x-api-key", "").encode("utf-8", "replace")
            has_x_api_key = hmac.compare_digest(x_api_key, self.key)
            if not is_bearer_of(request, self.key) and not has_x_api_key:
                return problem(401, "This is not the key of this rollout.")
            try:
                return await handler(request)
            except Refused as refused:
                return problem(refused.status, refused.message)

        return check_and_handle

    async def models(self, _: Request) -> Response:
        """Return the only model, as OpenAI's list of models."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "honesmith"}
        return JSONResponse({"object": "list", "data": [model]})

    def question_handler(self, dialect: Dialect) -> Handler:
        """Make the handler of a route whose requests and replies are in the protocol `dialect`,
        such as OpenAI's chat completions."""

        async def ask(request: Request) -> Response:
            """Queue the question of a request for the sampler, and answer with the completion,
            whole or as a stream of events."""
            question = dialect.read(await body_of(request))
            turn = await run_in_threadpool(self.session.prepare, question)
            future = self.batcher.ask(turn.prompt, turn.max_tokens, turn.stop)
            if question.stream:
                return ImpatientStream(
                    self.events(dialect, turn, future), media_type="text/event-stream"
                )
            answer = await self.answer(turn, future)
            return JSONResponse(dialect.reply(question, answer))

        return ask

    async def answer(self, turn: Turn, future: "Future[Completion]") -> Answer:
        """Wait for the completion, record it, and return it as an answer. `turn` is the question
        that is answered, `future` will get its completion. Raises Refused (401) if the rollout ends
        before it comes."""
        try:
            completion = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            raise Refused(401, "This rollout is over; its key is no longer valid.") from None
        return await run_in_threadpool(self.session.record, turn, completion)

    async def events(
        self, dialect: Dialect, turn: Turn, future: "Future[Completion]"
    ) -> AsyncIterator[str]:
        """Yield the answer to `turn`, once `future` has its completion, as server-sent events of
        the protocol `dialect`. Until then a comment, which clients skip, is sent every `BEAT_S`
        seconds."""
        answering = asyncio.ensure_future(self.answer(turn, future))
        finished, _ = await asyncio.wait({answering}, timeout=BEAT_S)
        while not finished:  # empty if the timeout came first
            yield ": waiting\n\n"  # a comment
            finished, _ = await asyncio.wait({answering}, timeout=BEAT_S)
        try:
            for event in dialect.events(turn.question, answering.result()):
                yield event
        except Refused as refused:
            yield f"data: {json.dumps({'error': {'message': refused.message}})}\n\n"


class Loop:
    """Context manager that runs the thread in which the servers of rollouts work."""

    def __init__(self) -> None:
        """Make the event loop and its thread. Entering the context starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)

    def __enter__(self) -> "Loop":
        """Start the thread, in which the event loop then runs."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End every server that is left, then the thread in which they run. Waits a few seconds for
        each of both."""
        ended = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        ended.result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def serve(self, app: Starlette, listener: socket.socket) -> Callable[[], None]:
        """Answer the HTTP requests that arrive on the socket `listener` with `app`, in this
        object's thread. Returns at once, with a function that ends this server."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=ImpatientProtocol,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADERS,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        # A copy of the descriptor, because the server closes its socket when it ends.
        socket_of_server = listener.dup()
        asyncio.run_coroutine_threadsafe(server.serve(sockets=[socket_of_server]), self._loop)

        def stop() -> None:
            """Make the server end, and with it the connections that are open."""
            server.should_exit = True
            server.force_exit = True

        return stop


async def _cancel_all() -> None:
    """Cancel all other tasks of the event loop and wait up to a second for them."""
    other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in other_tasks:
        task.cancel()
    if other_tasks:  # `wait` refuses an empty set
        await asyncio.wait(other_tasks, timeout=1.0)
