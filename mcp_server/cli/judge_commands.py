"""Commands about language models as judges: `honesmith judge ...`."""

from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.reply import Reply
from engine.evidence.judges.calibration import Calibration, calibrate
from engine.evidence.judges.gold import read_gold
from envs.judge import Judge, Rubric
from mcp_server.screen.terminal import (
    FAILED,
    OK,
    CommandGroup,
    HomeFolder,
    Json,
    command,
    home_of,
    show,
    working,
)

ASKING = "asking the judge about every gold answer"
app = typer.Typer(help="Language models as judges.", no_args_is_help=True, cls=CommandGroup)


@app.command("calibrate")
@command
def calibrate_judge(
    rubric: Annotated[
        Path, typer.Argument(metavar="RUBRIC", help="rubric.toml with [judge] and [[criteria]].")
    ],
    gold: Annotated[
        Path,
        typer.Argument(metavar="GOLD", help="JSONL: prompt, answer, label; reference, author."),
    ],
    home: HomeFolder = None,
    as_json: Json = False,
) -> int:
    """Hold a judge against gold labels: agreement, kappa, biases; stored for verdicts."""
    answers = read_gold(gold)
    try:
        parsed, judge = Rubric.from_file(rubric), Judge.from_file(rubric)
    except ValueError as problem:
        hint = "docs/judges.md shows a rubric.toml."
        raise UserError("BAD_ARGUMENT", str(problem), hint=hint, field="rubric") from problem
    with working(ASKING, as_json):
        calibration = calibrate(home_of(home), judge, parsed, answers)
    show(_reply(calibration), as_json)
    return FAILED if calibration.faults else OK


# Without a callback typer would turn a group of one command into that command.
@app.callback()
def _group() -> None:
    pass


def _reply(calibration: Calibration) -> Reply:
    """What came of a calibration."""
    faults = calibration.faults
    may = "may decide verdicts" if not faults else f"may not decide verdicts: {'; '.join(faults)}"
    sentences = " ".join(calibration.sentences)
    number = counted(calibration.answers, "gold answer")
    return {
        "summary": f"{calibration.model}, held against {number}, {may}. {sentences}",
        "trusted": not faults,
        **calibration.to_json(),
    }
