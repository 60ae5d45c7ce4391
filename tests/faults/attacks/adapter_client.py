"""Runs attacks in an environment of others that has a server of its own, as whoever starts it, and
says what each came to. The argument and the line it prints are those of client.py."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from client import refuse  # type: ignore[import-not-found]  # beside this file

from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.host.process import EnvProcess, EpisodeFailed
from envs.isolation.sandbox import Sandbox


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["refused"]:
        refuse(order["refused"])
    limits, sandbox = Limits(**order["limits"]), Sandbox(**order["sandbox"])
    said: dict = {"problem": None, "scores": [], "client": os.getpid()}
    with EnvProcess(Path(order["env"]), limits=limits, sandbox=sandbox) as process:
        try:
            said |= {"level": process.level, "gaps": process.gaps, "holds": process.isolation}
            (task,) = process.tasks()
        except EnvProblem as problem:
            said["problem"] = problem.to_dict()
            order["attacks"] = []
        for name, arguments in order["attacks"]:
            arguments = {
                key: os.getpid() if value == "client" else value for key, value in arguments.items()
            }
            text = json.dumps({"attack": name, "with": arguments})
            said["scores"].append(attacked(process, task, text))
    print(json.dumps(said))


def attacked(process: EnvProcess, task: dict, text: str) -> dict:
    """What an attack came to, in the form of a score."""
    try:
        episode = process.start(task)
        episode.step({"role": "assistant", "content": text})
        return episode.score()
    except EpisodeFailed as failed:
        return {"reward": 0.0, "error": str(failed)}


if __name__ == "__main__":
    main()
