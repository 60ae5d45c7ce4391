"""Plays programs whose reward is a file, as whoever starts it, and prints what each earned.

The argument is JSON: `folders` (of environments, each with its agent.py), `refused` as client.py
has it. Prints one line of JSON: for each folder the reply of the scorer and the seconds it took.
"""

import json
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from client import refuse  # type: ignore[import-not-found]  # beside this file

from envs.config.settings import Limits, Rollout
from envs.host.command import Commands, score_of
from envs.isolation.sandbox import Sandbox

TASK = {"id": "a", "prompt": [{"role": "user", "content": "say a"}]}


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["refused"]:
        refuse(order["refused"])
    rollout = Rollout(("python3", "agent.py"), reward="file", reward_file="out/reward.json")
    replies = []
    for folder in order["folders"]:
        began = time.monotonic()
        commands = Commands(
            Path(folder), rollout, sys.executable, Limits(), {}, None, Sandbox(allow_root=True)
        )
        with closing(commands.start()) as run:
            run.begin(TASK, {})
            reply = dict(score_of(rollout, run.wait()))
        replies.append({**reply, "took_s": time.monotonic() - began})
    print(json.dumps(replies))


if __name__ == "__main__":
    main()
