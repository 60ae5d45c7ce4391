"""What came of a demo: whether both runs made the model better, and how that is shown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.core.reply import Reply
from mcp_server.cli.demo.plans import DemoPlan
from mcp_server.screen.render import duration
from mcp_server.screen.values import VERDICTS


def ending(reply: Reply) -> str:
    """Return one line on how a finished run went; `reply` is its last status, as `wait_run` returns
    it.

    Example: "r-1  held-out success 0.310 -> 0.870  better" (the values before and after training,
    and the verdict). For a run without these values, such as an evaluation, the line is its
    summary.
    """
    result = reply.get("result") or {}
    evidence = result.get("evidence") or {}
    before = (evidence.get("before") or {}).get("value")
    after = (evidence.get("after") or {}).get("value")
    if before is None or after is None:
        return str(result.get("summary") or reply["summary"])
    verdict = str(reply.get("verdict", "")).replace("_", " ")
    metric = evidence.get("metric", "success")
    return f"{reply['run_id']}  held-out {metric} {before:.3f} -> {after:.3f}  {verdict}"


def column(logs: Mapping[str, Any], name: str) -> list[float]:
    """Return the numbers in the column `name` of a page of logs; [] if there is no such column.

    `logs` has `columns` (names) and `rows` (lists of cells). Cells without a number are left out.
    """
    columns: Sequence[str] = logs.get("columns") or []
    if name not in columns:
        return []
    index = list(columns).index(name)
    rows = logs.get("rows") or []
    values = [row[index] for row in rows if len(row) > index]
    return [float(value) for value in values if isinstance(value, int | float)]


def is_better(facts: Reply) -> bool:
    """Whether the demo has shown that both runs made the model better.

    For SFT and for GRPO the verdicts of the run and of the comparison must be "better", and the
    interval of the comparison must lie above 0. `facts` are the results of the demo
    (`Scene.facts`). After a failure some of them are missing, and the result is False.
    """
    for algorithm in ("sft", "grpo"):  # every plan trains once with each
        run = facts.get("runs", {}).get(algorithm, {})
        comparison = facts.get("compared", {}).get(algorithm, {})
        low, _ = _interval(comparison)
        both_better = run.get("verdict") == "better" and comparison.get("verdict") == "better"
        if not (both_better and low > 0):
            return False
    return True


def _interval(comparison_reply: Reply) -> tuple[float, float]:
    """Return the interval of the difference in the first comparison of a reply, as (low, high).

    `comparison_reply` is a reply of `compare_runs`. The interval is (-infinity, infinity) if the
    reply has none.
    """
    comparisons = comparison_reply.get("comparisons") or [{}]
    low, high = comparisons[0].get("interval") or (-math.inf, math.inf)
    return low, high


def show_result(console: Console, plan: DemoPlan, facts: Reply) -> None:
    """Print the verdicts, the answers before and after, the paths of reports and the time taken.

    `facts` are the results of a demo that did not fail (`Scene.facts`).
    """
    console.print()
    for algorithm in ("sft", "grpo"):  # every plan trains once with each
        _print_comparison(console, algorithm, facts)
    for training in plan.trainings:
        if training.question:
            console.print()
            console.print(f"“{training.question}”", soft_wrap=True)
            console.print(_answers(facts["chats"][training.algorithm]))
    console.print()
    if facts["better"]:
        console.print(Text("Verdict: better", style="bold green"))
    else:
        console.print(Text("Verdict: not better", style="bold red"))
    for report in facts["reports"]:
        console.print(f"Report:  {report}", soft_wrap=True)
    console.print(f"Time:    {duration(facts['seconds'])}")


def _print_comparison(console: Console, algorithm: str, facts: Reply) -> None:
    """Print how the model trained with `algorithm` compares with the model before training, and
    below it whether other skills suffered, if the run tested them.

    `facts` are the results of the demo (`Scene.facts`).
    """
    comparison = facts["compared"][algorithm]
    verdict = str(comparison.get("verdict", "unknown"))
    line = Text(f"{algorithm:<5}", style="bold")
    line.append(verdict.replace("_", " "), style=VERDICTS.get(verdict, ""))
    line.append(f"  {comparison['summary']}")
    console.print(line, soft_wrap=True)
    if skills_sentence := facts["kept_skills"][algorithm]:
        console.print(Text(f"{'':<5} {skills_sentence}", style="dim"), soft_wrap=True)


def _answers(chat: Reply) -> Table:
    """Render the answers of a chat as a table, with the model before training first."""
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    # The chat asked the trained model first, so the order is reversed.
    for answer in reversed(chat.get("answers") or []):
        table.add_row(str(answer.get("model", "")), str(answer.get("answer", "")).strip())
    return table
