"""Which program each kind of process runs: the arguments behind `python -P` on its command line.

Tests replace programs that need torch by scripts. Supervisors and servers are processes of their
own, so this choice is passed on in one environment variable, which only this module reads.
"""

import json
import os
from collections.abc import Mapping
from typing import Literal

Kind = Literal[
    "supervisor",
    "trainer",
    "rank",
    "smoke",
    "regrader",
    "asker",
    "prompter",
    "attendant",
    "speed_probe",
    "fast_paths",
    "summing",
    "merger",
    "gguf_importer",
    "server",
    "forwarder",
    "locator",
]

PROGRAMS: Mapping[Kind, str] = {
    "supervisor": "engine.supervisor",
    "trainer": "engine.worker",
    "rank": "engine.worker.helper",
    "smoke": "engine.worker.smoke",
    "regrader": "engine.runs.evaluation.regrade",
    "asker": "engine.runs.evaluation.asking",
    "prompter": "engine.runs.prompts.asking",
    "attendant": "engine.executors.attending.attendant",
    "speed_probe": "engine.worker.probe_speed",
    "fast_paths": "engine.worker.fast_paths",
    "summing": "engine.worker.fast_paths.summing",
    "merger": "engine.worker.serving.merge",
    "gguf_importer": "engine.models.gguf.importer",
    "server": "engine.worker.serving.openai_server",
    "forwarder": "engine.serving.far.forwarder",
    "locator": "engine.serving.locate",
}
# For tests only: the environment variable with a JSON object, kind of program -> script.
STAND_INS = "HONESMITH_TEST_PROGRAMS"


def command(kind: Kind) -> list[str]:
    """Return the arguments that start a program of this kind, to be put behind `python -P`.

    For example ["-m", "engine.supervisor"]. The program's own arguments come after them.
    """
    script = _stand_ins().get(kind)  # set if a test replaces the program
    return [script] if script else ["-m", PROGRAMS[kind]]


def trainer_is_replaced() -> bool:
    """Return whether a test runs a script in place of the trainer; always False outside tests. Then
    nothing needs torch, and no speed is measured."""
    script_of_program = _stand_ins()  # kind of program -> the script in its place
    return "trainer" in script_of_program


def _stand_ins() -> Mapping[str, str]:
    """Return kind of program -> path of the script with which a test replaces it; {} outside
    tests."""
    return json.loads(os.environ.get(STAND_INS) or "{}")
