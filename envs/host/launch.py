"""What the parent of user code is told when it starts: JSON on its command line. Standard library
only."""

import json
from dataclasses import asdict, dataclass, replace

from envs.config.settings import Limits
from envs.isolation.packages import Order, Packages
from envs.isolation.sandbox import Reach, Sandbox


@dataclass(frozen=True)
class Launch:
    """One env process, or with `install` one installation of packages.

    Attributes:
        source: the environment's folder, which is copied into `box`.
        box: a private folder, removed at the end.
        requests, replies: file descriptors of the two pipes to the client.
        log: the file that output is appended to, up to `log_cap` bytes; "" for none.
        secrets: names of variables whose values are taken out of the log.
        spaces: "bubblewrap" where that has put the parent into namespaces already, else "".
        reach: what the child may reach beside the system's files and its packages.
    """

    source: str
    box: str
    requests: int
    replies: int
    limits: Limits
    packages: Packages
    sandbox: Sandbox
    reach: Reach
    log: str
    log_cap: int
    secrets: tuple[str, ...]
    install: Order | None = None
    spaces: str = ""

    def to_json(self) -> str:
        """Every user of the machine can read a command line: variables of `install` may hold
        passwords and are left out (they are set as the process's own)."""
        install = replace(self.install, variables={}) if self.install else None
        return json.dumps(asdict(replace(self, install=install)))

    @staticmethod
    def from_json(text: str) -> "Launch":
        """What `to_json` gave."""
        given = json.loads(text)
        reach = given["reach"]
        return Launch(
            **given
            | {
                "limits": Limits(**given["limits"]),
                "packages": Packages(**given["packages"]),
                "sandbox": Sandbox(**given["sandbox"]),
                "reach": Reach(**{name: tuple(values) for name, values in reach.items()}),
                "install": Order(**given["install"]) if given["install"] else None,
            }
        )
