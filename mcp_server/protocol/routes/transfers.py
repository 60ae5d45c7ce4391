"""Environments uploaded, exports downloaded, and sharing, over HTTP.

PUT  /envs/NAME              a zip (or {"files": {path: text}}) is pushed; `?install=true`
GET  /exports/RUN            an export as a tar; `?format=merged`
POST /share                  {"name": ..., "with": [...], "may": "read"|"use", "stop": false}
GET  /share                  what the key shares
"""

import json
import tarfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from mcp.server import MCPServer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from engine.core.errors import UserError
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.home.team.owners import May
from mcp_server.access import sharing
from mcp_server.access.audit_log import Audit, Call
from mcp_server.access.keys import Key, Scope
from mcp_server.access.viewing import caller_view, viewing
from mcp_server.api import verbs
from mcp_server.api.replies import clean, envelope, error_line
from mcp_server.protocol.guard import KEY_IN_SCOPE, internal_error

_BLOCK = 512  # bytes of a block of a tar file
_CHUNK = 1 << 20  # bytes read at once
_RouteAnswer = Callable[[Home, Request], Awaitable[Response]]
_STATUS = {"FORBIDDEN": 403, "QUOTA": 429, "INTERNAL": 500, "DISK_FULL": 507}


def add_transfers(server: MCPServer[Any], home: Home) -> None:
    """Register the routes on `server`, which serves `home`."""

    def route(path: str, methods: list[str], answer: _RouteAnswer) -> None:
        """Let `answer` answer requests for `path`."""
        server.custom_route(path, methods)(partial(answer, home))

    route("/envs/{name}", ["PUT"], _put_env)
    route("/exports/{run_id}", ["GET"], _get_export)
    route("/share", ["GET"], _list_shares)
    route("/share", ["POST"], _change_share)


async def _put_env(home: Home, request: Request) -> Response:
    """Answer PUT /envs/NAME: push what the body holds."""
    name, install = request.path_params["name"], request.query_params.get("install") == "true"
    body = await request.body()

    def push(view: Home, key: Key) -> Reply:
        """Push a zip, or the files of a JSON object."""
        files: Mapping[str, object] | bytes = body
        if body.lstrip()[:1] == b"{":
            files = _files_in(body)
        return verbs.push_env(view, name=name, install=install, key=key, files=files)

    arguments = {"name": name, "install": install, "bytes": len(body)}
    return await _answer(home, request, _Routed("push_env", "train", "use", arguments), push)


async def _get_export(home: Home, request: Request) -> Response:
    """Answer GET /exports/RUN: the export as a tar, or 202 while it is still made."""
    run_id = request.path_params["run_id"]
    form = request.query_params.get("format", "adapter")
    reply: Reply = {}

    def export(view: Home, key: Key) -> Reply:
        """Write the export into the home, where the caller has no part of the path to say."""
        if not key.is_owner:
            from engine.models import catalog  # noqa: PLC0415  late: few calls need it

            catalog.check_in_sight(view, run_id)
        reply.update(verbs.deploy(view, run_id, "export", form, key=key))
        return reply

    call = _Routed("deploy", "deploy", "use", {"run_id": run_id, "format": form})
    answer = await _answer(home, request, call, export)
    if answer.status_code != 200:
        return answer
    if reply.get("state") != "exported":  # a merge goes on; the same call returns its result
        return JSONResponse(clean(reply), status_code=202, headers={"Retry-After": "10"})
    folder = Path(str(reply["path"]))
    return StreamingResponse(
        tar_of(folder),
        media_type="application/x-tar",
        headers={"Content-Disposition": f'attachment; filename="{folder.name}.tar"'},
    )


async def _list_shares(home: Home, request: Request) -> Response:
    """Answer GET /share: what the key shares."""
    call = _Routed("", "read", "read", {})
    return await _answer(home, request, call, lambda view, _: sharing.list_shares(view))


async def _change_share(home: Home, request: Request) -> Response:
    """Answer POST /share: share what the body names, or stop sharing it."""
    body = await request.body()

    def share(view: Home, _: Key) -> Reply:
        """Read the body, and do as it says."""
        wanted = _object_in(body)
        grantees = wanted.get("with", [])
        if not isinstance(grantees, list):
            raise _bad_body('"with" is a list of names of keys')
        return sharing.share(
            view,
            str(wanted.get("name", "")),
            [str(name) for name in grantees],
            str(wanted.get("may", "read")),
            wanted.get("stop") is True,
        )

    call = _Routed("share", "train", "change", {"body": body.decode("utf-8", "replace")})
    return await _answer(home, request, call, share)


@dataclass(frozen=True)
class _Routed:
    """A call of a route, as far as the guard of the tools would want to know it: its name in the
    audit log ("" if it changes nothing), the scope that it needs, what it does with what it names,
    and its arguments."""

    tool: str
    scope: Scope
    may: May
    arguments: Mapping[str, object]


async def _answer(
    home: Home, request: Request, call: _Routed, act: Callable[[Home, Key], Reply]
) -> Response:
    """Let `act` do the call in a thread, with the view that the caller has of the home, and return
    its reply as JSON; an error as the JSON object that tools answer."""
    key: Key = request.scope[KEY_IN_SCOPE]
    try:
        key.require(call.scope, call.tool or request.url.path)
        with viewing(key, call.may):
            view = caller_view(home)
        reply = await anyio.to_thread.run_sync(partial(_recorded, home, key, call, act, view))
        return JSONResponse(clean(envelope(reply, default_summary="Done.")))
    except Exception as error:  # noqa: BLE001  the outermost handler of the route
        known = error if isinstance(error, UserError) else internal_error(call.tool, error)
        is_absent = known.code.endswith("_NOT_FOUND")
        status = 404 if is_absent else _STATUS.get(known.code, 400)
        return Response(error_line(known), status, media_type="application/json")


def _recorded(
    home: Home, key: Key, call: _Routed, act: Callable[[Home, Key], Reply], view: Home
) -> Reply:
    """Call `act`, and write the call into the audit log if it changes something."""
    if not call.tool:
        return act(view, key)
    line = Call(key.name, "http", call.tool, call.arguments)
    with Audit(home).recording(line) as record:
        reply = act(view, key)
        record.succeeded(reply)
    return reply


def tar_of(folder: Path) -> Iterator[bytes]:
    """Yield the files below `folder` as an uncompressed tar file, without reading any of them
    whole; links are left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
        with path.open("rb") as file:
            entry.size = path.stat().st_size
            entry.mode = 0o644
            yield entry.tobuf()
            left = entry.size
            while left and (chunk := file.read(min(_CHUNK, left))):
                left -= len(chunk)
                yield chunk
        yield b"\0" * (left + -entry.size % _BLOCK)  # `left`: the file became shorter meanwhile
    yield b"\0" * (2 * _BLOCK)


def _files_in(body: bytes) -> Mapping[str, object]:
    """Return the files in a body of JSON: {"files": {path: text}}."""
    files = _object_in(body).get("files")
    if not isinstance(files, dict):
        raise _bad_body('it is {"files": {"environment.py": "..."}}, or a zip')
    return files


def _object_in(body: bytes) -> dict[str, object]:
    """Return the JSON object in a body. Raises UserError BAD_ARGUMENT if it holds none."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise _bad_body(f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _bad_body("it is no JSON object")
    return value


def _bad_body(why: str) -> UserError:
    """Make the error for a body that cannot be used."""
    return UserError("BAD_ARGUMENT", f"the body cannot be used: {why}"[:300], hint="Correct it.")
