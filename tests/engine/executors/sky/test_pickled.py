"""The address in a handle, read from a pickle that nothing of is run."""

import base64
import os
import pickle
from typing import Any

import pytest
from fake_sky import CloudVmRayResourceHandle

from engine.executors.sky.pickled import Address, Damaged, address_of, plain


def encoded(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(pickle.dumps(value, protocol)).decode()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_address_is_read_from_every_protocol_of_pickles(protocol):
    handle = CloudVmRayResourceHandle("hs-x-1", 41234)
    assert address_of(encoded(handle, protocol)) == Address("127.0.0.1", 41234)
    handle.docker_user = "sky"  # pyright: ignore[reportAttributeAccessIssue]
    assert address_of(encoded(handle, protocol)) == Address("127.0.0.1", 41234, "sky")


def test_a_machine_of_a_private_network_has_its_inner_address():
    handle = CloudVmRayResourceHandle("hs-x-1", 22)
    handle.stable_internal_external_ips = [("10.0.0.4", None)]  # pyright: ignore
    assert address_of(encoded(handle)) == Address("10.0.0.4", 22)


class Evil:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_nothing_of_a_pickle_is_run(tmp_path):
    file = tmp_path / "run"
    handle = CloudVmRayResourceHandle("hs-x-1", 22)
    handle.launched_resources = Evil(str(file))  # pyright: ignore[reportAttributeAccessIssue]
    assert address_of(encoded(handle)) == Address("127.0.0.1", 22)
    assert address_of(encoded(Evil(str(file)))) is None
    assert not file.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"stable_internal_external_ips": None},
        {"stable_internal_external_ips": [("10.0.0.1", "evil.example -oProxyCommand=id")]},
        {"stable_internal_external_ips": ["10.0.0.1"]},
        {"stable_ssh_ports": [0]},
        {"stable_ssh_ports": ["22"]},
    ],
)
def test_an_address_that_is_none_is_not_taken(changes):
    handle = CloudVmRayResourceHandle("hs-x-1", 22)
    vars(handle).update(changes)
    assert address_of(encoded(handle)) is None


@pytest.mark.parametrize(
    "handle",
    [None, 7, "", "no base64", "gA==", encoded({"a": 1})[:-8], "A" * (3 << 20)],
)
def test_what_is_no_handle_is_none(handle):
    assert address_of(handle) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04", b"\x80\x04(.", b"\x80\x04h\x07.", b"\x80\x04u.", b"\x80\x04\x85.", b"c"],
)
def test_a_damaged_pickle_is_refused(data):
    with pytest.raises(Damaged):
        plain(data)
