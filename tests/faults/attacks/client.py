"""Runs attacks in an env process, as whoever starts it, and says what each came to.

The argument is JSON: `env` (folder), `attacks` ([name, arguments] each), `limits`, `sandbox`, and
`refused`, names of what the kernel must refuse to this process, as a container would: `unshare`,
`namespaces`, `landlock`, `seccomp`. Prints one line of JSON.
"""

import json
import os
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.host.process import EnvProcess
from envs.isolation import kernel
from envs.isolation.sandbox import Sandbox

TASK = {"id": "a", "prompt": [{"role": "user", "content": "attack"}], "answer": None}
NUMBERS = {
    "x86_64": {"unshare": 272, "mount": 165, "prctl": 157},
    "aarch64": {"unshare": 97, "mount": 40, "prctl": 167},
}[os.uname().machine]


def refuse(names: list[str]) -> None:
    """Puts this process under a filter of its own that makes the kernel look older or shut."""
    lines = [(0x20, 0, 0, 0)]  # the number of the call
    plain = [444] if "landlock" in names else []
    plain += [NUMBERS["unshare"]] if {"unshare", "namespaces"} & set(names) else []
    plain += [NUMBERS["mount"]] if "namespaces" in names else []
    for number in plain:
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1)]
    if "seccomp" in names:  # prctl(PR_SET_SECCOMP)
        lines += [(0x15, 0, 3, NUMBERS["prctl"]), (0x20, 0, 0, 16), (0x15, 0, 1, 22)]
        lines += [(0x06, 0, 0, 0x00050000 | 22)]
    lines.append((0x06, 0, 0, 0x7FFF0000))
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    try:
        kernel.set_seccomp_filter(code)
    except OSError:  # only root may without giving up more
        kernel.forbid_new_privileges()
        kernel.set_seccomp_filter(code)


def main() -> None:
    order = json.loads(sys.argv[1])
    if order["refused"]:
        refuse(order["refused"])
    limits, sandbox = Limits(**order["limits"]), Sandbox(**order["sandbox"])
    said: dict = {"problem": None, "scores": [], "client": os.getpid()}
    with EnvProcess(Path(order["env"]), limits=limits, sandbox=sandbox) as process:
        try:
            said |= {"level": process.level, "gaps": process.gaps, "holds": process.isolation}
        except EnvProblem as problem:
            said["problem"] = problem.to_dict()
            order["attacks"] = []
        for name, arguments in order["attacks"]:
            arguments = {
                key: os.getpid() if value == "client" else value for key, value in arguments.items()
            }
            text = json.dumps({"attack": name, "with": arguments})
            said["scores"].append(process.score(TASK, text))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
