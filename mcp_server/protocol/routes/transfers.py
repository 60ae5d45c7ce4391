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
_RouteHandler = Callable[[Home, Request], Awaitable[Response]]
_STATUS_BY_CODE = {"FORBIDDEN": 403, "QUOTA": 429, "INTERNAL": 500, "DISK_FULL": 507}


def add_transfers(server: MCPServer[Any], home: Home) -> None:
    """Register on `server`, which serves `home`, the HTTP routes that upload an environment,
    download an export and change what is shared."""

    def route(path: str, methods: list[str], handler: _RouteHandler) -> None:
        """Let `handler` answer requests for `path` by these HTTP methods."""
        server.custom_route(path, methods)(partial(handler, home))

    route("/envs/{name}", ["PUT"], _put_env)
    route("/exports/{run_id}", ["GET"], _get_export)
    route("/share", ["GET"], _list_shares)
    route("/share", ["POST"], _change_share)


async def _put_env(home: Home, request: Request) -> Response:
    """Answer PUT /envs/NAME: store the environment whose files the body holds as a version. The
    body is a zip file, or JSON with the text of each file. Returns the reply of `push_env`."""
    name, install = request.path_params["name"], request.query_params.get("install") == "true"
    body = await request.body()

    def push(view: Home, key: Key) -> Reply:
        """Push the files in the body for the caller with this key and this view of the home."""
        files: Mapping[str, object] | bytes = body
        is_json = body.lstrip()[:1] == b"{"  # no zip file begins so
        if is_json:
            files = _files_in(body)
        return verbs.push_env(view, name=name, install=install, key=key, files=files)

    arguments = {"name": name, "install": install, "bytes": len(body)}
    call = _RouteCall("push_env", scope="train", may="use", arguments=arguments)
    return await _answer(home, request, call, push)


async def _get_export(home: Home, request: Request) -> Response:
    """Answer GET /exports/RUN: export the model of a run, and return its files as a tar file.

    While the export is still being made, the answer is its state with status 202; an error is
    answered as JSON.
    """
    run_id = request.path_params["run_id"]
    export_format = request.query_params.get("format", "adapter")
    reply: Reply = {}  # that of `deploy`, filled by `export`

    def export(view: Home, key: Key) -> Reply:
        """Write the export into a folder of the home; a caller over HTTP cannot choose the path."""
        if not key.is_owner:
            from engine.models import catalog  # noqa: PLC0415  late: few calls need it

            catalog.check_in_sight(view, run_id)  # `run_id` could be the path of any file
        reply.update(verbs.deploy(view, run_id, "export", export_format, key=key))
        return reply

    arguments = {"run_id": run_id, "format": export_format}
    call = _RouteCall("deploy", scope="deploy", may="use", arguments=arguments)
    answer = await _answer(home, request, call, export)
    if answer.status_code != 200:  # an error
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
    """Answer GET /share with what the caller shares with others."""

    def list_shares(view: Home, _: Key) -> Reply:
        """Return what the caller with this view of the home shares."""
        return sharing.list_shares(view)

    # No tool name: the call changes nothing, so the audit log has no line for it.
    call = _RouteCall(tool="", scope="read", may="read", arguments={})
    return await _answer(home, request, call, list_shares)


async def _change_share(home: Home, request: Request) -> Response:
    """Answer POST /share: share what the body names with other keys, or stop sharing it.

    The body is JSON: {"name": ..., "with": [names of keys], "may": "read" or "use", "stop": bool}.
    """
    body = await request.body()

    def share(view: Home, _: Key) -> Reply:
        """Share or stop sharing, as the body says, for the caller with this view of the home."""
        fields = _object_in(body)
        grantees = fields.get("with", [])
        if not isinstance(grantees, list):
            raise _bad_body('"with" is a list of names of keys')
        return sharing.share(
            view,
            name=str(fields.get("name", "")),
            grantees=[str(name) for name in grantees],
            may=str(fields.get("may", "read")),
            stop=fields.get("stop") is True,
        )

    arguments = {"body": body.decode("utf-8", "replace")}
    call = _RouteCall("share", scope="train", may="change", arguments=arguments)
    return await _answer(home, request, call, share)


@dataclass(frozen=True)
class _RouteCall:
    """A call of a route, with what a call of a tool would be checked for.

    Attributes:
        tool: its name in the audit log; "" if it changes nothing, and so has no line there.
        scope: the scope that the key of the caller needs.
        may: what the call does with the things that it names: read, use or change.
        arguments: of which the audit log stores the digest.
    """

    tool: str
    scope: Scope
    may: May
    arguments: Mapping[str, object]


async def _answer(
    home: Home, request: Request, call: _RouteCall, act: Callable[[Home, Key], Reply]
) -> Response:
    """Check that the caller may make `call`, do it, and return its reply as a JSON response. An
    error is returned as the JSON object of tools' errors, with a fitting HTTP status.

    `act(view, key)` does the call, in a thread; `view` is the home as the caller sees it, `key` the
    key of the caller.
    """
    key: Key = request.scope[KEY_IN_SCOPE]
    try:
        key.require(call.scope, call.tool or request.url.path)
        with viewing(key, call.may):
            view = caller_view(home)
        reply = await anyio.to_thread.run_sync(partial(_recorded, home, key, call, act, view))
        return JSONResponse(clean(envelope(reply, default_summary="Done.")))
    except Exception as error:  # noqa: BLE001  the outermost handler of the route
        # Any error but a UserError is a bug, of which the caller is told no details.
        user_error = error if isinstance(error, UserError) else internal_error(call.tool, error)
        is_absent = user_error.code.endswith("_NOT_FOUND")
        status = 404 if is_absent else _STATUS_BY_CODE.get(user_error.code, 400)
        return Response(error_line(user_error), status, media_type="application/json")


def _recorded(
    home: Home, key: Key, call: _RouteCall, act: Callable[[Home, Key], Reply], view: Home
) -> Reply:
    """Return the reply of `act(view, key)`, and write the call into the audit log of `home` if it
    changes something (has a tool name). What cannot be recorded is not done."""
    if not call.tool:
        return act(view, key)
    audited_call = Call(key.name, "http", call.tool, call.arguments)
    with Audit(home).recording(audited_call) as record:
        reply = act(view, key)
        record.succeeded(reply)
    return reply


def tar_of(folder: Path) -> Iterator[bytes]:
    """Yield the bytes of an uncompressed tar file with all files below `folder`. No file is read
    whole into memory. Links are left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
        with path.open("rb") as file:
            entry.size = path.stat().st_size
            entry.mode = 0o644
            yield entry.tobuf()
            bytes_left = entry.size
            while bytes_left and (chunk := file.read(min(_CHUNK, bytes_left))):
                bytes_left -= len(chunk)
                yield chunk
        # Zeros fill the last block. They also stand for bytes that are missing because the file
        # became shorter while it was read: the entry has promised its size.
        bytes_to_full_block = -entry.size % _BLOCK
        yield b"\0" * (bytes_left + bytes_to_full_block)
    yield b"\0" * (2 * _BLOCK)  # two empty blocks end a tar file


def _files_in(body: bytes) -> Mapping[str, object]:
    """Return the files, path -> text, in the body {"files": {path: text}} of a request. The texts
    are not checked. Raises UserError BAD_ARGUMENT for any other body."""
    files = _object_in(body).get("files")
    if not isinstance(files, dict):
        raise _bad_body('it is {"files": {"environment.py": "..."}}, or a zip')
    return files


def _object_in(body: bytes) -> dict[str, object]:
    """Return the JSON object that the body of a request holds. Raises UserError BAD_ARGUMENT if it
    holds anything else."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise _bad_body(f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _bad_body("it is no JSON object")
    return value


def _bad_body(why: str) -> UserError:
    """Make the BAD_ARGUMENT error for the body of a request that cannot be used; `why` says what is
    wrong with it. The message is cut to 300 characters."""
    return UserError("BAD_ARGUMENT", f"the body cannot be used: {why}"[:300], hint="Correct it.")
