"""Confines itself and becomes one command of an agent; run by envs/sandboxes/local.py.

Standard input is a job as JSON: `command`, `readable` and `writable` paths, `envs` (the folder of
our package). The argument is a descriptor: there it says why it could not confine itself. It closes
when the command begins, which so cannot write to it.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

NOT_CONFINED = 126


def main() -> None:
    """Confine this process by the job on standard input, and become its command."""
    os.set_inheritable(int(sys.argv[1]), False)
    job = json.load(sys.stdin)
    spec = importlib.util.spec_from_file_location(
        "envs", Path(job["envs"], "__init__.py"), submodule_search_locations=[job["envs"]]
    )
    assert spec is not None  # a .py path always has one
    sys.modules["envs"] = importlib.util.module_from_spec(spec)  # its own code is not needed
    from envs.isolation import inner_box  # noqa: PLC0415 - found by the lines above

    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        confined = inner_box.confine_commands(job["readable"], job["writable"])
    except OSError as error:
        sys.exit(_refuse(f"{error}"))
    if not confined:
        sys.exit(_refuse("this kernel has no Landlock"))
    os.execv("/bin/bash", ["bash", "-c", job["command"]])


def _refuse(reason: str) -> int:
    """Say why the command does not run, and return the exit status for that."""
    os.write(int(sys.argv[1]), reason.encode())
    return NOT_CONFINED


if __name__ == "__main__":
    main()
