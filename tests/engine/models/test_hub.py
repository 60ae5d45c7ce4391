"""Models by hub id, against a server on the loopback."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.models import catalog, hub
from tests import hub_server, tiny_model
from tests.hub_server import Hub


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # Weights much larger than what is read to look at them.
    tiny_model.write_model(tmp_path / "upstream", vocab_size=9000, eos_token_id=257)
    files = {path.name: path.read_bytes() for path in (tmp_path / "upstream").iterdir()}
    with hub_server.serving(Hub(files), tmp_path / "shared-cache", monkeypatch) as state:
        yield state


def refusal(home: Home, ref: str = "org/tiny") -> UserError:
    with pytest.raises(UserError) as caught:
        catalog.resolve_model(home, ref)
    return caught.value


def test_looking_at_a_model_fetches_its_headers_not_its_weights(
    home: Home, server: Hub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "_FIRST_BYTES", 4096)
    weights = len(server.files["model.safetensors"])
    ref = catalog.resolve_model(home, "org/tiny")
    assert ref.facts.vocab == 9000 and ref.facts.weight_bytes < weights
    assert server.sent < 60_000 < weights
    assert hub.missing_bytes(ref.base_path) == weights
    assert not (ref.base_path / "model.safetensors").exists()


def test_a_model_looked_at_once_is_not_asked_for_again(home: Home, server: Hub):
    first = catalog.resolve_model(home, "org/tiny")
    server.asked.clear()
    assert catalog.resolve_model(home, "org/tiny") == first
    assert server.asked == []


def test_weights_arrive_whole_and_only_once(home: Home, server: Hub):
    folder = catalog.resolve_model(home, "org/tiny").base_path
    seen: list[tuple[int, int]] = []
    hub.ensure_weights(folder, lambda done, total: seen.append((done, total)))
    size = len(server.files["model.safetensors"])
    assert (folder / "model.safetensors").read_bytes() == server.files["model.safetensors"]
    assert seen[-1] == (size, size)
    assert hub.missing_bytes(folder) == 0 and hub.is_complete(folder)
    assert hub.cached_ids(home) == ["org/tiny"]
    server.asked.clear()
    hub.ensure_weights(folder)
    assert server.asked == []


def test_a_broken_download_goes_on_where_it_stopped(home: Home, server: Hub):
    folder = catalog.resolve_model(home, "org/tiny").base_path
    server.asked.clear()
    server.cut_at = 1000
    hub.ensure_weights(folder)
    assert (folder / "model.safetensors").read_bytes() == server.files["model.safetensors"]
    assert [span for _, span, _ in server.asked] == ["", "bytes=1000-"]


def test_a_download_whose_process_was_killed_goes_on_where_it_stopped(home: Home, server: Hub):
    folder = catalog.resolve_model(home, "org/tiny").base_path
    part = folder / "model.safetensors.part"
    server.stall_at = 200_000
    code = f"import pathlib; from engine.models import hub; hub.ensure_weights({folder!r})"
    code = code.replace("PosixPath", "pathlib.Path")
    child = subprocess.Popen([sys.executable, "-P", "-c", code])
    deadline = time.monotonic() + 4
    while not (part.is_file() and part.stat().st_size) and time.monotonic() < deadline:
        child.poll()
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    server.stall_at = None
    server.go_on.set()
    server.asked.clear()
    size = part.stat().st_size
    assert 0 < size <= 200_000
    hub.ensure_weights(folder)
    assert (folder / "model.safetensors").read_bytes() == server.files["model.safetensors"]
    assert [span for _, span, _ in server.asked] == [f"bytes={size}-"]


def test_a_server_without_ranges_works_too(home: Home, server: Hub):
    server.ranges = False
    folder = catalog.resolve_model(home, "org/tiny").base_path
    server.cut_at = 1000
    hub.ensure_weights(folder)
    assert hub.is_complete(folder)


def test_weights_with_a_wrong_checksum_are_thrown_away(home: Home, server: Hub):
    folder = catalog.resolve_model(home, "org/tiny").base_path
    data = bytearray(server.files["model.safetensors"])
    data[-1] ^= 1
    server.files["model.safetensors"] = bytes(data)
    with pytest.raises(UserError, match="checksum"):
        hub.ensure_weights(folder)
    assert not list(folder.glob("model.safetensors*[!header]"))


def test_weights_arrive_in_a_trainer_where_transformers_is_kept_offline(
    home: Home, server: Hub, monkeypatch: pytest.MonkeyPatch
):
    folder = catalog.resolve_model(home, "org/tiny").base_path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as engine/supervisor.py starts a trainer
    hub.ensure_weights(folder)
    assert hub.is_complete(folder)


def test_a_full_disk_is_named(home: Home, server: Hub):
    folder = catalog.resolve_model(home, "org/tiny").base_path
    (folder / "model.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match="no room for the files of org/tiny") as caught:
        hub.ensure_weights(folder)
    assert caught.value.code == "DISK_FULL" and "None" not in caught.value.message


@pytest.mark.parametrize(
    ("status", "words"), [(404, "does not exist"), (401, "permission"), (403, "permission")]
)
def test_what_the_hub_refuses_is_explained(home: Home, server: Hub, status: int, words: str):
    server.status = status
    error = refusal(home)
    assert error.code == "MODEL_NOT_FOUND" and words in error.message and not error.retryable


def test_a_gated_model_names_the_next_move_and_never_the_token(
    home: Home, server: Hub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_a_user")
    server.status = 403
    error = refusal(home)
    assert "Accept the model's terms" in error.hint and "HF_TOKEN" in error.hint
    assert "hf_secret" not in f"{error.message} {error.hint}"


def test_an_unreachable_or_failing_hub_may_be_tried_again(
    home: Home, server: Hub, monkeypatch: pytest.MonkeyPatch
):
    server.status = 503
    assert refusal(home).retryable
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert refusal(home).retryable


def test_offline_means_no_request(home: Home, server: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refusal(home).message
    assert server.asked == []


def test_the_token_goes_to_the_hub_when_one_is_set(
    home: Home, server: Hub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    catalog.resolve_model(home, "org/tiny")
    assert {sent for _, _, sent in server.asked} == {"Bearer hf_test"}


def test_an_adapter_comes_with_its_weights_and_goes_on_its_base(
    home: Home, server: Hub, tmp_path: Path
):
    tiny_model.write_model(tmp_path / "base")
    tiny_model.write_adapter(tmp_path / "adapter", tiny_model.config())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "base")
    weights = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    server.files.clear()
    server.files["adapter_config.json"] = json.dumps(config).encode()
    server.files["adapter_model.safetensors"] = weights
    model = catalog.resolve_model(home, "org/tiny")
    assert (model.kind, model.base_path) == ("adapter", tmp_path / "base")
    assert model.adapter is not None
    assert (model.adapter / "adapter_model.safetensors").read_bytes() == weights
    asked = len(server.asked)
    assert catalog.resolve_model(home, "org/tiny") == model and len(server.asked) == asked


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.safetensors": None, "pytorch_model.bin": b"x"}, "pickled"),
        ({"model.safetensors": None}, "no model.safetensors"),
        ({"config.json": None, "adapter_config.json": b"{}"}, "no transformers model"),
        ({"config.json": None}, "no transformers model"),
        ({"chat_template.jinja": None}, "no chat template"),
        ({"config.json": b'{"auto_map": {"AutoModel": "x.Y"}}'}, "its own Python code"),
        ({"model.safetensors": b"\x80\x02" + b"\xff" * 500}, "not a safetensors file"),
    ],
)
def test_a_repository_that_cannot_be_trained_is_refused_before_its_weights(
    home: Home, server: Hub, change: dict[str, bytes | None], reason: str
):
    for name, data in change.items():
        if data is None:
            server.files.pop(name)
        else:
            server.files[name] = data
    error = refusal(home)
    assert error.code == "MODEL_UNSUPPORTED" and reason in error.message
    assert server.sent < 100_000
