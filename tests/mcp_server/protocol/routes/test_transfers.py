"""Files in and out over HTTP: pushed, exported, shared, each by whom it is allowed to."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import anyio
import pytest
from answered import SUMS
from starlette.testclient import TestClient
from team import key_of, of, stored

from engine.core.errors import UserError
from engine.environments.registry import find_env
from engine.home.run_dir import Home
from mcp_server.access.keys import Keys, add_key
from mcp_server.api import verbs
from mcp_server.protocol.app import build_server
from mcp_server.protocol.http_app import LOOPBACK, MAX_BODY, Gate, http_app
from mcp_server.protocol.routes.transfers import add_transfers, tar_of

OWNERS = "owners-token-of-the-test"


@pytest.fixture
def client(home: Home, tmp_path: Path) -> TestClient:
    server = build_server(home, [tmp_path])
    add_transfers(server, home)
    app = http_app(server, Keys(home, OWNERS), LOOPBACK)
    return TestClient(app, base_url="http://localhost")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def zip_of(files: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


@pytest.mark.timeout(60)
def test_a_zip_and_texts_are_pushed_as_one_version_of_the_key(home: Home, client: TestClient):
    key, token = add_key(home, "ana", ["read", "train"])
    packed = zip_of({"environment.py": SUMS})
    pushed = client.put("/envs/sums", content=packed, headers=bearer(token))
    assert pushed.status_code == 200, pushed.text
    reply = pushed.json()
    assert reply["env_id"].startswith("sums@") and reply["audit"] and reply["next"]
    again = client.put(
        "/envs/sums", json={"files": {"environment.py": SUMS}}, headers=bearer(token)
    )
    assert again.json()["env_id"] == reply["env_id"]
    assert find_env(of(home, key), "sums").env_id == reply["env_id"]
    with pytest.raises(UserError):
        find_env(of(home, key_of(home, "bob")), "sums")
    lines = [json.loads(line) for line in home.audit.read_text().splitlines()]
    assert [(line["who"], line["tool"], line["result"]) for line in lines] == [
        ("ana", "push_env", "ok")
    ] * 2


def test_who_may_not_push_export_or_share_is_told_before_anything_happens(
    home: Home, client: TestClient
):
    _, token = add_key(home, "ana", ["read"])
    headers = bearer(token)
    for answer in (
        client.put("/envs/sums", content=b"x", headers=headers),
        client.get("/exports/r-1", headers=headers),
        client.post("/share", json={"name": "sums"}, headers=headers),
    ):
        assert answer.status_code == 403 and answer.json()["code"] == "FORBIDDEN"
    assert client.put("/envs/sums", content=b"x").status_code == 401
    _, token = add_key(home, "bob", ["read", "train"])
    files = {"files": {"environment.py": SUMS}}
    refused = client.put("/envs/sums?install=true", json=files, headers=bearer(token))
    assert refused.status_code == 403 and refused.json()["code"] == "FORBIDDEN"


def test_a_fault_of_an_upload_is_an_error_like_that_of_a_tool(home: Home, client: TestClient):
    _, token = add_key(home, "ana", ["read", "train"])
    for body in (b"no zip", b'{"files": 3}', b"{", zip_of({"../up.py": "x"})):
        answer = client.put("/envs/sums", content=body, headers=bearer(token))
        assert answer.status_code == 400, answer.text
        assert {"code", "message", "hint", "retryable"} <= set(answer.json())


def test_an_upload_may_be_larger_than_a_call_and_not_larger_than_a_push(
    home: Home, client: TestClient
):
    _, token = add_key(home, "ana", ["read", "train"])
    large = b"\0" * (MAX_BODY + 1)
    assert client.put("/envs/a", content=large, headers=bearer(token)).status_code == 400
    assert client.post("/share", content=large, headers=bearer(token)).status_code == 413
    length = {"content-length": str((64 << 20) + 1)} | bearer(token)
    assert client.put("/envs/a", content=b"", headers=length).status_code == 413


async def test_a_key_uploads_once_at_a_time_and_cannot_hold_up_another(home: Home):
    _, hers = add_key(home, "ana", ["read", "train"])
    _, his = add_key(home, "bob", ["read", "train"])
    server = build_server(home, [])
    add_transfers(server, home)
    gate = http_app(server, Keys(home, OWNERS), LOOPBACK)
    assert isinstance(gate, Gate)
    answered: dict[str, int] = {}
    arrived = anyio.Event()

    async def put(name: str, token: str, receive: Any) -> None:
        async def send(message: Any) -> None:
            answered.setdefault(name, message.get("status", 0))

        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {token}".encode())]
        headers.append((b"content-length", b"9"))
        scope = {"type": "http", "method": "PUT", "path": "/envs/a", "headers": headers}
        await gate(scope, receive, send)

    async def slow() -> Any:
        arrived.set()
        await anyio.sleep_forever()

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async with anyio.create_task_group() as group:
        group.start_soon(put, "first", hers, slow)
        await arrived.wait()
        await put("second", hers, gone)
        await put("his", his, gone)
        group.cancel_scope.cancel()
    await put("third", hers, gone)
    assert answered == {"second": 503, "his": 400, "third": 400}


def test_a_key_shares_its_own_and_cannot_share_what_is_anothers(home: Home, client: TestClient):
    ana, hers = add_key(home, "ana", ["read", "train"])
    bob, his = add_key(home, "bob", ["read", "train"])
    env_id = stored(of(home, ana), "secret")
    refused = client.post("/share", json={"name": "secret"}, headers=bearer(his))
    none = client.post("/share", json={"name": "zebras"}, headers=bearer(his))
    assert refused.status_code == none.status_code == 400
    assert refused.text.replace("secret", "NAME") == none.text.replace("zebras", "NAME")
    body = {"name": "secret", "with": ["bob"], "may": "use"}
    shared = client.post("/share", json=body, headers=bearer(hers))
    assert shared.json()["shares"] == [
        {"name": "secret", "kind": "env", "owner": "ana", "with": "bob", "may": "use"}
    ]
    assert find_env(of(home, bob, "use"), "ana/secret").env_id == env_id
    listed = client.get("/share", headers=bearer(his)).json()
    assert listed["shares"] == [], "he shares nothing"
    stopped = client.post("/share", json=body | {"stop": True}, headers=bearer(hers))
    assert stopped.json()["shares"] == []


def test_an_export_tells_a_key_of_no_file_of_this_machine(
    home: Home, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"no")
    _, token = add_key(home, "ana", ["deploy"])
    told = set()
    for name in ("~root", "~nobody-is-called-so", "bad.gguf", "none.gguf"):
        answer = client.get(f"/exports/{name}", headers=bearer(token))
        told.add((answer.status_code, answer.text.replace(name, "NAME")))
    assert len(told) == 1, told


def test_a_key_shares_with_names_of_keys_and_with_a_bounded_number(home: Home, client: TestClient):
    ana, hers = add_key(home, "ana", ["read", "train"])
    stored(of(home, ana), "secret")

    def shared_with(*names: str) -> tuple[int, str]:
        body = {"name": "secret", "with": names}
        answer = client.post("/share", json=body, headers=bearer(hers))
        return answer.status_code, answer.json().get("code", "")

    for names in (["x" * 41], ["*"], [""], [f"key-{number}" for number in range(101)]):
        assert shared_with(*names) == (400, "BAD_ARGUMENT")
    assert client.get("/share", headers=bearer(hers)).json()["shares"] == []
    assert shared_with("bob", "eve") == (200, "")


def test_an_export_comes_as_a_tar_and_one_under_way_says_to_ask_again(
    home: Home, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "r-1-best"
    (folder / "sub").mkdir(parents=True)
    (folder / "adapter.bin").write_bytes(b"\1" * 1000)
    (folder / "sub" / "README.md").write_text("card")
    (folder / "link").symlink_to("/etc/passwd")
    states = iter(["exporting", "exported"])
    monkeypatch.setattr(
        verbs,
        "deploy",
        lambda *given, **more: {"state": next(states), "path": str(folder), "summary": "."},
    )
    _, token = add_key(home, "ana", ["deploy"])
    assert client.get("/exports/r-1@best", headers=bearer(token)).status_code == 202
    answer = client.get("/exports/r-1@best?format=merged", headers=bearer(token))
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames() == ["adapter.bin", "sub/README.md"]
        member = archive.extractfile("adapter.bin")
        assert member is not None and member.read() == b"\1" * 1000
    assert b"".join(tar_of(folder)) == answer.content
