"""Runs attacks in an environment of a foreign format, as whoever starts it, and says what each came
to. The argument and the line it prints are those of client.py, with `played` of foreign.py."""

import json
import os
import sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from client import refuse  # type: ignore[import-not-found]  # beside this file

from envs.config.problem import EnvProblem
from envs.config.settings import Limits, read_settings
from envs.host.command import Commands, score_of
from envs.host.process import EnvProcess, EpisodeFailed
from envs.isolation.sandbox import OPEN_NETWORK, Sandbox

GATEWAY = {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["refused"]:
        refuse(order["refused"])
    limits, sandbox = Limits(**order["limits"]), Sandbox(**order["sandbox"])
    said: dict = {"problem": None, "scores": [], "client": os.getpid()}
    folder = Path(order["env"])
    with EnvProcess(folder, limits=limits, sandbox=sandbox) as process:
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
            if order["played"] == "score":
                score = process.score(task, text)
            elif order["played"] == "program":
                score, is_open = of_a_program(folder, task, text, limits, sandbox)
                if is_open and OPEN_NETWORK not in said["gaps"]:
                    said["gaps"] = [*said["gaps"], OPEN_NETWORK]
            else:
                score = of_turns(process, task, text, order["played"])
            said["scores"].append(dict(score))
    print(json.dumps(said))


def of_turns(process: EnvProcess, task: dict, text: str, played: str) -> dict:
    """What an attack in a turn or in a tool came to, in the form of a score."""
    message: dict = {"role": "assistant", "content": text}
    if played == "tool":
        call = {"name": "attack", "arguments": json.dumps({"text": text})}
        message |= {
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        }
    try:
        episode = process.start(task)
        reply = episode.step(message)
        score = dict(episode.score())  # which also ends a server of the rollout's own
        if played == "tool":
            said = reply[0]["content"] if reply else ""
            if said != "worked" and not said.startswith("stopped: "):
                raise ValueError(f"the tool did not run: {said}")
            score["error"] = None if said == "worked" else said
        return score
    except EpisodeFailed as failed:
        return {"reward": 0.0, "error": str(failed)}


def of_a_program(
    folder: Path, task: dict, text: str, limits: Limits, sandbox: Sandbox
) -> tuple[dict, bool]:
    """What an attack by the program of a rollout, or by a server that it starts, came to, and
    whether its box says that more than the gateway can be reached."""
    rollout = read_settings(folder).rollout
    assert rollout is not None
    commands = Commands(folder, rollout, sys.executable, limits, {}, None, sandbox)
    with closing(commands.start()) as run:
        run.begin({**task, "metadata": {"seed": text}}, GATEWAY)
        ending = run.wait()
        return dict(score_of(rollout, ending)), ending.open_network


if __name__ == "__main__":
    main()
