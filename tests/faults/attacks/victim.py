"""Somebody else's process under the same uid: a secret variable, sockets of every kind.

Says where they are as one line of JSON, and ends with its standard input.
"""

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
    said = {
        "pid": os.getpid(),
        "tcp": tcp.getsockname()[1],
        "udp": udp.getsockname()[1],
        "path": f"{folder}/victim.sock",
        "abstract": name,
    }
    print(json.dumps(said), flush=True)
    sys.stdin.read()


main()
