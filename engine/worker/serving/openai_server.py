"""The process of a deployment: an OpenAI-compatible chat server on loopback.

`python -P -m engine.worker.serving.openai_server DEPLOY_FOLDER`. There is one process per base
model, with many adapters addressed by model name. It ends by itself when nobody has asked for a
while.

Our own sampler or a vLLM server samples the answers (`serve_with` in config.json). Only the routes
below can be reached, each except /health with the deployment's key. What one client may use is
bounded: the size of a request and the time it takes to arrive, the number of parallel answers, and
how long an answer waits to be read.
"""

import asyncio
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from engine.machine.processes.deployments import Json
from engine.records.settings import MAX_RANK
from engine.worker.core.runtime import prepare

prepare()

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.core.slow_clients import ImpatientProtocol
from engine.home.hashes import weight_hashes
from engine.home.run_dir import DeployDir
from engine.machine.install import vllm_env
from engine.machine.processes.vllm_process import Plan
from engine.worker.components import quiet_libraries
from engine.worker.core.failures import WorkerFailure
from engine.worker.gateway.chat_request import ChatRequest, Refused, Reply, parse_chat
from engine.worker.gateway.http_parts import (
    BEAT_S,
    ImpatientStream,
    body_of,
    is_bearer_of,
    problem,
    refusal_of_place,
)
from engine.worker.serving.chat_models import Models, Served
from engine.worker.serving.own_models import OwnModels
from engine.worker.serving.token_logprobs import parse_logprobs
from engine.worker.serving.vllm_models import VllmModels, serving_plan

MAX_HEADERS = 64 * 1024  # bytes
MAX_BUSY = 128  # answers in progress; the sampler may let some of them wait
MAX_CONNECTIONS = 512
# Each answer in progress may occupy a thread; the further threads load adapters at the same time.
THREADS = MAX_BUSY + 16


_T = TypeVar("_T")
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The HTTP side of a deployment: its routes, its key, and its end after a time without
    requests."""

    def __init__(self, folder: DeployDir, served: Served, idle_minutes: float) -> None:
        """Prepare the server; it listens only once `run` is called.

        Args:
            folder: the folder of the deployment, with its key.
            served: answers the requests.
            idle_minutes: the server stops after so long without a request; 0 means never.
        """
        self.folder = folder
        self.served = served
        self.key = folder.key.read_text().strip().encode()
        self.idle_s = idle_minutes * 60  # 0: never stops
        self.last_used = time.monotonic()
        self.busy = 0  # how many answers are in progress
        self.uvicorn: uvicorn.Server | None = None
        self.port = 0  # known once it listens

    def app(self) -> Starlette:
        """Make the application with all routes. They answer on loopback only, and all but /health
        need the deployment's key."""
        return Starlette(
            routes=[
                Route("/health", self.local(self.health)),
                Route("/v1/models", self.guarded(self.models)),
                Route("/v1/chat/completions", self.guarded(self.chat), methods=["POST"]),
                Route("/v1/completions", self.guarded(self.rate), methods=["POST"]),
                Route("/admin/adapters", self.guarded(self.adapters), methods=["POST"]),
                Route("/admin/stop", self.guarded(self.stop), methods=["POST"]),
            ]
        )

    def local(self, handler: Handler) -> Handler:
        """Wrap `handler` so that it answers only requests whose Host is on loopback (421 otherwise)
        and whose Origin, if there is one, is there too (403 otherwise). This keeps out web pages in
        a browser on this machine, which can reach loopback as well."""

        async def check_and_handle(request: Request) -> Response:
            """Return `handler`'s response, or an error response: 421 for a Host other than
            loopback, 403 for another Origin."""
            refusal = refusal_of_place(request)
            if refusal is not None:
                return refusal
            return await handler(request)

        return check_and_handle

    def guarded(self, handler: Handler) -> Handler:
        """Wrap `handler` so that it answers only requests from this machine (see `local`) that have
        the deployment's bearer token. If it raises `Refused`, that becomes an error response."""

        async def check_and_handle(request: Request) -> Response:
            """Return `handler`'s response, or an error response: 401 if the bearer token is missing
            or wrong, or the status with which the handler refused the request."""
            if not is_bearer_of(request, self.key):
                return problem(401, "A bearer token is needed.")
            # The server stops when idle; only requests with the right key restart the idle time.
            self.last_used = time.monotonic()
            try:
                return await handler(request)
            except Refused as refusal:
                return problem(refusal.status, refusal.message)

        return self.local(check_and_handle)

    async def health(self, _: Request) -> Response:
        """Answer that the server is up, and how many answers are in progress."""
        return JSONResponse({"status": "ok", "active": self.busy})

    async def models(self, _: Request) -> Response:
        """Answer with the names of the base and its adapters, as OpenAI's list of models."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "honesmith"}
            for name in self.served.names()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion, whole or as a stream of events.

        Raises:
            Refused: 404 for an unknown model, 429 if `MAX_BUSY` answers are in progress, and 400,
                408 or 413 for a body or a prompt that cannot be served.
        """
        chat_request = parse_chat(await body_of(request))
        if chat_request.model not in self.served.names():
            known_names = ", ".join(self.served.names())
            raise Refused(404, f"No model {chat_request.model!r} here; there are {known_names}.")
        if self.busy >= MAX_BUSY:
            raise Refused(429, f"{self.busy} answers are in progress; ask again later.")
        if not chat_request.stream:
            completion = run_in_threadpool(self.served.complete, chat_request)
            return JSONResponse(await self.run_as_busy(completion))
        self.served.prompt_ids(chat_request)  # raises Refused before the stream begins
        return ImpatientStream(self.events(chat_request), media_type="text/event-stream")

    async def rate(self, request: Request) -> Response:
        """Answer with the log-probabilities of the request's own token ids.

        Raises:
            Refused: 400 for a body that is not such a request, 404 for an unknown model, 429 if
                `MAX_BUSY` answers are in progress, 408 or 413 if the body arrives too slowly or is
                too large.
        """
        logprobs_request = parse_logprobs(await body_of(request))
        if self.busy >= MAX_BUSY:
            raise Refused(429, f"{self.busy} answers are in progress; ask again later.")
        reply = await self.run_as_busy(run_in_threadpool(self.served.rate, logprobs_request))
        return JSONResponse(reply)

    async def run_as_busy(self, answer: Awaitable[_T]) -> _T:
        """Await `answer` and return its result. Meanwhile it counts as in progress, so that the
        server does not stop as idle."""
        self.busy += 1
        try:
            return await answer
        finally:
            self.busy -= 1
            self.last_used = time.monotonic()

    async def events(self, chat_request: ChatRequest) -> AsyncIterator[str]:
        """Yield the pieces of the answer to `chat_request` as server-sent events, and `[DONE]` at
        the end.

        Whenever no piece has come for `BEAT_S` seconds, a comment is sent, which clients skip. The
        answer counts as in progress until the end, so that the server does not stop as idle.
        """
        self.busy += 1
        pieces = self.served.pieces(chat_request)
        sampling: asyncio.Task[Reply | None] | None = None
        try:
            while True:
                # The result is None after the last piece.
                sampling = asyncio.create_task(run_in_threadpool(next, pieces, None))
                finished, _ = await asyncio.wait({sampling}, timeout=BEAT_S)
                while not finished:  # empty if the timeout came first
                    yield ": waiting\n\n"  # a comment
                    finished, _ = await asyncio.wait({sampling}, timeout=BEAT_S)
                piece = sampling.result()
                if piece is None:
                    break
                yield f"data: {json.dumps(piece)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            # Closing `pieces` frees the model. If the client leaves while a piece is being sampled,
            # closing has to wait for this piece.
            if sampling is not None and not sampling.done():
                sampling.add_done_callback(lambda _: pieces.close())
            else:
                pieces.close()
            self.busy -= 1
            self.last_used = time.monotonic()

    async def adapters(self, request: Request) -> Response:
        """Load the adapter in the folder `path` of the body, and serve it as the model `name` of
        the body. The response lists the names of all models.

        Raises:
            Refused: 400 if the body or the adapter cannot be read or the adapter does not fit, 409
                if the adapter changes nothing.
        """
        body = await body_of(request)
        if not isinstance(body, dict) or not body.get("name") or not body.get("path"):
            raise Refused(400, "name and path are needed.")
        folder = Path(str(body["path"]))
        check_rank(folder)
        try:
            await self.run_as_busy(run_in_threadpool(self.served.add, str(body["name"]), folder))
        except Refused:  # `guarded` turns this into the response
            raise
        except Exception as error:  # a damaged adapter can fail anywhere while it loads
            traceback.print_exc()
            raise Refused(400, f"{folder.name} holds no adapter that can be read.") from error
        self.announce()
        return JSONResponse({"models": self.served.names()})

    async def stop(self, _: Request) -> Response:
        """Tell the server to stop; this request is answered before that."""
        if self.uvicorn is not None:
            self.uvicorn.should_exit = True
        return JSONResponse({"stopping": True})

    def announce(self) -> None:
        """Write ready.json, which says where this server is and which models it has."""
        write_json(
            self.folder.ready,
            {
                "url": f"http://127.0.0.1:{self.port}/v1",
                "port": self.port,
                "pid": os.getpid(),
                "models": self.served.names(),
            },
        )

    async def run(self, port: int) -> None:
        """Serve requests until the server is told to stop, has been idle for too long, or its vLLM
        server has died.

        Args:
            port: where to listen; 0 takes any free port.

        Raises:
            RuntimeError: the port cannot be opened.
        """
        config = uvicorn.Config(
            self.app(),
            host="127.0.0.1",
            port=port,
            log_level="warning",
            access_log=False,
            http=ImpatientProtocol,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
        current_default_thread_limiter().total_tokens = THREADS
        server = self.uvicorn = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await _wait_until_started(server, serving)
        self.port = int(server.servers[0].sockets[0].getsockname()[1])
        self.announce()
        while not serving.done():
            await asyncio.wait({serving}, timeout=1.0)
            # If the vLLM server has died, stop, so that the next call starts a new deployment.
            if not self.served.models.is_alive or self._is_idle():
                server.should_exit = True
        await serving

    def _is_idle(self) -> bool:
        """Tell whether the server has been unused for longer than allowed; an `idle_s` of 0 sets no
        limit."""
        unused_s = time.monotonic() - self.last_used
        return self.idle_s > 0 and self.busy == 0 and unused_s > self.idle_s


async def _wait_until_started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """Wait until `server`, which runs as the task `serving`, accepts connections. Raises the error
    that ended the server, or RuntimeError if the port cannot be opened."""
    while not server.started:
        if serving.done():
            await serving  # raises the error that ended it, if there was one
            raise RuntimeError("the port could not be opened")
        await asyncio.sleep(0.01)


def check_rank(folder: Path) -> None:
    """Check the rank in an adapter's config before memory for that rank is allocated.

    Raises:
        Refused: 400, if the config cannot be read, or the rank is not from 1 to `MAX_RANK`.
    """
    try:
        rank = read_json(folder / "adapter_config.json")["r"]
    # OSError: no file; ValueError: no JSON; KeyError: no rank; TypeError: no JSON object.
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(400, f"{folder.name} holds no adapter that can be read.") from error
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        # `:.20` quotes at most 20 characters, since the value may be anything.
        raise Refused(400, f"{folder.name} has rank {rank!r:.20}; at most {MAX_RANK} is served.")


def main(path: Path) -> int:
    """Load the models of the deployment folder `path` and serve them until the server stops.

    Returns the exit status: 0 after an ordinary end, or at once if another process serves this
    deployment already; 3 after an error, which is written to failed.json.
    """
    quiet_libraries()
    folder = DeployDir(path)
    with folder.lock.open("a") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # another process serves this deployment
        return _serve(folder, read_json(folder.config))


def _serve(folder: DeployDir, config: Json) -> int:
    """Load the base and the adapters that the config names, and serve them until the server stops.
    Returns the exit status: 0, or 3 after an error, whose message is then in failed.json."""
    models: Models | None = None
    try:
        models = load_models(folder, config)
        served = Served(models)
        for adapter in config["adapters"]:
            served.add(adapter["name"], Path(adapter["path"]))
        server = Server(folder, served, float(config.get("idle_stop_minutes", 10)))
        asyncio.run(server.run(int(config.get("port", 0))))
    # Refused: an adapter; UserError, WorkerFailure: the base or vLLM; OSError: a file;
    # RuntimeError: the port, or torch.
    except (Refused, UserError, WorkerFailure, OSError, RuntimeError) as error:
        traceback.print_exc()
        write_json(folder.failed, {"message": str(error)})
        return 3
    finally:
        folder.ready.unlink(missing_ok=True)
        if models is not None:
            models.close()
    return 0


def load_models(folder: DeployDir, config: Json) -> Models:
    """Load the base model of a deployment, without adapters: on a vLLM server if the deployment's
    config.json says so (`serve_with`), otherwise on our own sampler.

    Raises:
        WorkerFailure, UserError: the base cannot be loaded, or vLLM is not set up.
    """
    base_path = Path(config["base_path"])
    # The device that the parent process has reserved for this one.
    device = os.environ.get("HONESMITH_DEVICE", "cpu")
    thinking = bool(config.get("thinking", False))
    weights = weight_hashes(folder.home, base_path)
    if config.get("serve_with") != "vllm":
        return OwnModels(
            base_path,
            config["base_name"],
            device,
            thinking=thinking,
            base_weights=weights,
            comparisons_file=folder.home.comparisons,
        )
    return VllmModels(
        _vllm_plan(folder, config, device),
        config["base_name"],
        folder=folder.adapters,
        log=folder.vllm_log,
        thinking=thinking,
        base_weights=weights,
    )


def _vllm_plan(folder: DeployDir, config: Json, device: str) -> Plan:
    """Return the settings with which the vLLM server of a deployment is started. Raises UserError
    if vLLM is not set up."""
    return serving_plan(
        vllm_env.require_python(folder.home),
        Path(config["base_path"]),
        device,
        rank=int(config.get("lora_rank") or 0),
        share=float(config.get("memory_share") or 0.5),
        length=int(config.get("served_length") or 0),
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
