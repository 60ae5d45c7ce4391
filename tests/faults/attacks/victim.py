"""Somebody else's process under the same uid: a secret variable, sockets of every kind, and
memory to share.

Says where they are as one line of JSON, and ends with its standard input.
"""

import ctypes
import json
import os
import socket
import sys


def main() -> None:
    folder = sys.argv[1]
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    path = socket.socket(socket.AF_UNIX)
    path.bind(f"{folder}/victim.sock")
    path.listen()
    name = f"victim-{os.getpid()}"
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + name)
    abstract.listen()
    letters = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    letters.bind(f"{folder}/letters.sock")
    said = {
        "pid": os.getpid(),
        "tcp": tcp.getsockname()[1],
        "udp": udp.getsockname()[1],
        "path": f"{folder}/victim.sock",
        "abstract": name,
        "letters": f"{folder}/letters.sock",
        "memory": shared_memory(),
    }
    print(json.dumps(said), flush=True)
    sys.stdin.read()


def shared_memory() -> int:
    """The id of a System V segment that goes with this process."""
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    made = libc.shmget(0, 4096, 0o1600)
    libc.shmat(made, None, 0)
    libc.shmctl(made, 0, None)
    return made


main()
