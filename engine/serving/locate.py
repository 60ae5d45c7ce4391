"""A program that says where a model of a home is served, and serves it first if nobody does.

    python -P -m engine.serving.locate HOME MODEL SECONDS

It prints one JSON object: {"url", "key"}, or {"code", "message", "hint"} of the error. Judges that
are models of the home are asked there (engine/models/served/judge.py).
"""

import json
import sys
import time
from pathlib import Path

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.machine.processes.deployments import ANYBODY
from engine.serving.service import serve, target_of


def main(root: str, model: str, seconds: str) -> None:
    """Print the address and key of the server of `model`, which is started first if there is none:
    {"url", "key"} as JSON, or {"code", "message", "hint"} of the error.

    Args:
        root: the folder of the home.
        model: the model's name there.
        seconds: how long this may take, as the command line gives it.
    """
    home = Home.locate(Path(root))
    try:
        deadline = time.monotonic() + float(seconds)
        row, _ = serve(home, target_of(home, model), deadline, ANYBODY)
        key = home.deployment(row.deployment_id).key.read_text().strip()
        reply = {"url": row.url, "key": key}
    except UserError as error:
        reply = {"code": error.code, "message": error.message, "hint": str(error.hint or "")}
    sys.stdout.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
