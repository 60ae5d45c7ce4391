"""Stands in for `engine.worker.fast_paths`: at the path that HONESMITH_TEST_PATH names it does what
the name says after the colon, without torch."""

import json
import os
import signal
import sys
import threading


def tell(line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    broken, _, what = os.environ["HONESMITH_TEST_PATH"].partition(":")
    if broken == "start":
        sys.exit("no CUDA driver")
    tell({"identity": {"device": "a card", "driver": "580.1"}})
    for name in sys.argv[1:]:
        tell({"began": name})
        if name == "vllm":
            tell({"doing": "wake up"})
        if name == broken and what == "hang":
            threading.Event().wait()
        if name == broken and what == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == broken and what == "exit":
            sys.exit("an illegal memory access was encountered")
        tell({"result": {"name": name, "state": "on", "difference": 0.0, "allowed": 0.1}})


if __name__ == "__main__":
    main()
