"""Installs packages that attack, and starts an environment on them, as whoever starts this.

The argument is JSON: `requirements`, `target` (an empty folder), `pip` (the folder with pip),
`wheels` (the only place to find packages), `source_builds`, `env` (a folder, or ""), `plant` (files
of the site-packages written after the installation), `sandbox`, `refused` as for client.py. Prints
one line of JSON: the `problem` of the installation, that of the `start`, `gaps`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(1, str(Path(__file__).resolve().parent))

from client import refuse

from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.host.pipe import Fault, Pipe
from envs.host.process import EnvProcess
from envs.isolation.packages import InstallOrder, packages_of
from envs.isolation.sandbox import Reach, Sandbox

LIMITS = Limits(memory_mb=2048, processes=128, file_mb=512)


def install(order: dict, sandbox: Sandbox, said: dict) -> None:
    wanted = InstallOrder(
        tuple(order["requirements"]),
        order["target"],
        order["pip"],
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": order["wheels"]},
        order["source_builds"],
    )
    reach = Reach((order["pip"], order["wheels"]), (order["target"],))
    with tempfile.TemporaryDirectory() as nothing:
        log = Path(order["log"])
        here = packages_of(sys.executable)
        pipe = Pipe(Path(nothing), here, LIMITS, {}, log, sandbox, wanted, reach)
        try:
            said["gaps"] = list(pipe.greet(100.0)[0].gaps)
        except EnvProblem as problem:
            said["problem"] = problem.to_dict()
        except Fault as fault:
            said["problem"] = {"code": "FAULT", "message": str(fault)}
        finally:
            pipe.close()


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["refused"]:
        refuse(order["refused"])
    sandbox = Sandbox(**order["sandbox"])
    said: dict = {"problem": None, "start": None, "gaps": [], "imported": ""}
    if order["requirements"]:
        install(order, sandbox, said)
    if said["problem"] is None and order["env"]:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        packages = Path(order["target"], "lib", f"python{version}", "site-packages")
        for name, text in order["plant"].items():
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).write_text(text)
        python = str(Path(order["target"], "bin", "python"))
        with EnvProcess(Path(order["env"]), python=python, sandbox=sandbox) as process:
            try:
                process.describe()
                said["gaps"] = process.gaps
                task = {"id": "a", "prompt": [{"role": "user", "content": "x"}], "answer": None}
                score = process.score(task, "")
                said["imported"] = score["error"] or score["reward"]
            except EnvProblem as problem:
                said["start"] = problem.to_dict()
    print(json.dumps(said))


if __name__ == "__main__":
    os.umask(0o022)
    main()
