"""Why did the run do what it did? Detectors over its files, ranked, each with one lever.

"Nothing found" is an answer: it says what was looked at. Texts in examples are data of a model and
an environment, cleaned and with secrets hidden.
"""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from engine.core.files import read_object
from engine.core.format import counted
from engine.core.hints import Call
from engine.core.reply import BODY_CHARS
from engine.evidence.detect.baseline import against_start, first_exam, gold_tokens, references
from engine.evidence.detect.detectors import find_all, not_judged
from engine.evidence.detect.findings import Finding
from engine.evidence.detect.views import Facts, Row, View, is_pleased_and_wrong, view_of
from engine.evidence.stats import thresholds as at
from engine.evidence.stats.power import split_rows
from engine.evidence.stats.results import answer_of, load_rows, text_of
from engine.evidence.verdict.fresh_scores import rescored
from engine.evidence.verdict.verdict import run_verdict
from engine.home.curves import load_metrics, number
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, clip, json_chars, redactor_for
from engine.home.store import Store
from engine.records.run_config import EvaluateConfig, RegradeConfig, RunConfig

_EXAMPLES = 2
_LOOKED_AT, _COMPARED = 200, 400  # answers, and characters of each, held against their references
_EXAMPLE_CHARS = 220
_ROLLOUT_BYTES = 24_000_000  # read at most; steps are left out evenly beyond it
_LIKE = {
    # Which rollouts show a finding; without an entry any does.
    "truncation": lambda row: row.get("stop_reason") in ("length", "max_turns"),
    "overthinking": lambda row: row.get("stop_reason") == "length",
    "reward_errors": lambda row: bool(row.get("error")),
    "judge_pleasing": is_pleased_and_wrong,
    "too_hard": lambda row: row.get("success") is False,
    "below_start": lambda row: row.get("success") is not True,
    "length_grew": lambda row: row.get("stop_reason") == "length",
    "too_short": lambda row: row.get("success") is False,
    "unparsed": lambda row: not row.get("success") and not row.get("error"),
}
_BEST_FIRST = ("reward_hacking", "judge_pleasing", "too_hard", "below_start", "too_short")


def diagnose(home: Home, run_id: str) -> dict[str, Any]:
    """Ranked findings on a run in any state, and what could not be judged.

    Each: `id`, `what`, `evidence`, `examples` (rollouts, with how to read them in full), `lever`,
    `playbook`. Raises UserError RUN_NOT_FOUND.
    """
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    config = run.find_config()  # a run with a damaged config is looked at all the same
    redact = redactor_for(home, config.env_dir if config else None)
    facts = facts_of(run, row, config)
    findings = find_all(facts)
    examples = _Examples(run, facts, redact)
    gone = f"{row.run_id} is {row.state}; its files were deleted." if run.deleted.exists() else ""
    result: dict[str, Any] = {
        "summary": gone or _sentence(row, facts, findings),
        "run_id": row.run_id,
        "state": row.state,
        "findings": [_shown(finding, examples, redact) for finding in findings],
        "looked_at": _looked_at(facts),
        "not_judged": not_judged(facts),
        "warnings": _warnings(row, facts),
        "next": _next(row, findings, examples.step),
    }
    while json_chars(result) > BODY_CHARS and any(f["examples"] for f in result["findings"]):
        next(f for f in reversed(result["findings"]) if f["examples"])["examples"].pop()
    return result


def facts_of(run: RunDir, row: RunRow, config: RunConfig | None) -> Facts:
    """Everything detectors read, from the files of a run."""
    settings = _settings_of(config)
    algorithm = row.algorithm if row.kind == "train" else "evaluate"
    failure = {}
    if row.state == "failed":
        said = read_object(run.failure)
        failure = said | {"kind": row.reason_kind, "message": row.reason}
    split = config.split if isinstance(config, EvaluateConfig | RegradeConfig) else "heldout"
    events = load_rows(run.events)
    exam_rows = _last_exam(run)
    if algorithm == "evaluate":
        views = _evaluated(run, config, settings)
    else:
        views = _views(run, settings)
    select = [r for r in exam_rows if r.get("half") == "select"] or exam_rows
    verdict = run_verdict(run) if row.state == "done" else {}
    return Facts(
        algorithm=algorithm,
        settings=settings if row.kind == "train" else settings | {"rows": _rows_of(config)},
        lines=load_metrics(run.metrics).lines,
        views=views,
        exam=view_of(0, exam_rows, settings) if exam_rows else None,
        exam_tasks=len({str(r.get("task")) for r in select}),
        rows=next((event for event in reversed(events) if event.get("event") == "data"), {}),
        failure=failure,
        verdict=verdict,
        rescored=rescored(run),
        exam_start=first_exam(run, settings) if row.kind == "train" else None,
        against_start=against_start(run) if row.kind == "train" else {},
        gold_tokens=gold_tokens(run) if row.kind == "train" else None,
        heldout_rows=split_rows(run.home, row.env_id, split),
        kept=verdict.get("kept_skills") or {},
    )


def _views(run: RunDir, settings: Mapping[str, Any]) -> list[View]:
    steps = run.rollout_steps()
    sizes = {step: _size(run, step) for step in steps}
    ends = {*steps[: at.WINDOW], *steps[-2 * at.WINDOW :]}
    room = _ROLLOUT_BYTES - sum(sizes[step] for step in ends)
    middle = [step for step in steps if step not in ends]
    usual = max(1, sum(sizes[step] for step in middle) // max(1, len(middle)))
    kept = max(0, min(len(middle), room // usual))
    ends |= {middle[i * len(middle) // kept] for i in range(kept)}
    views = (view_of(step, load_rows(run.rollouts(step)), settings) for step in sorted(ends))
    return [view for view in views if view is not None]


def _size(run: RunDir, step: int) -> int:
    try:
        return run.rollouts(step).stat().st_size
    except OSError:
        return 0


def _settings_of(config: RunConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    settings = config.settings
    return settings if isinstance(settings, dict) else settings.model_dump()


def _rows_of(config: RunConfig | None) -> int | None:
    return config.rows if isinstance(config, EvaluateConfig | RegradeConfig) else None


def _evaluated(run: RunDir, config: RunConfig | None, settings: Mapping[str, Any]) -> list[View]:
    """The answers of the last model that was asked; of a probe its rollouts."""
    for index in reversed(range(len(config.model_refs if config else []))):
        view = view_of(0, load_rows(run.model_evals(index)), settings)
        if view is not None:
            return [view]
    return _views(run, settings)


def _last_exam(run: RunDir) -> Sequence[Row]:
    """The answers after training on the held-out tasks, where they were asked."""
    for step in reversed([step for step in run.eval_steps() if step > 0]):
        rows = [row for row in load_rows(run.evals(step)) if "completion" in row]
        if rows:
            return rows
    return []


# --- what is shown ----------------------------------------------------------------------------


class _Examples:
    """Rollouts of the last step that was played, to show a finding with."""

    def __init__(self, run: RunDir, facts: Facts, redact: Redactor) -> None:
        steps = run.rollout_steps()
        self.run = run
        self.redact = redact
        self.step = -1
        self.rows: Sequence[Row] = []
        if facts.algorithm == "grpo" and steps:
            self.step = steps[-1]
            self.rows = load_rows(run.rollouts(self.step))
        elif facts.algorithm == "sft":
            self.rows = _last_exam(run)

    def of(self, finding: Finding) -> list[dict[str, Any]]:
        if not finding.pick or (finding.pick == "changed" and self.step >= 0):
            return []  # sampled rollouts do not show what changed on held-out tasks
        fits = _LIKE.get(finding.id, lambda _row: True)
        rows = [row for row in self.rows if fits(row)]
        best_first = finding.id in _BEST_FIRST
        rows.sort(key=lambda row: number(row.get("reward")) or 0.0, reverse=best_first)
        if finding.id == "too_short":
            return self._nearest(rows)
        tasks: dict[str, Row] = {}
        for row in rows:
            tasks.setdefault(str(row.get("task")), row)
        return [self._item(row) for row in list(tasks.values())[:_EXAMPLES]]

    def _nearest(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The best paid answer, of equals the one most like its reference, and that beside it."""
        golds = references(self.run)

        def paid(row: Row) -> float:
            return number(row.get("reward")) or 0.0

        def near(row: Row) -> float:
            gold, said = golds.get(str(row.get("task")), ""), answer_of(dict(row))
            alike = SequenceMatcher(None, gold[:_COMPARED], said[:_COMPARED]).ratio()
            return alike if gold else 0.0

        if not rows:
            return []
        # They come best paid first: only those paid as well as the first can be the best.
        best = max((row for row in rows[:_LOOKED_AT] if paid(row) == paid(rows[0])), key=near)
        gold = golds.get(str(best.get("task")), "")
        shown = clip(self.redact.text(gold), _EXAMPLE_CHARS)
        return [self._item(best) | ({"reference": shown} if gold else {})]

    def _item(self, row: Row) -> dict[str, Any]:
        item = {
            "step": self.step if self.step >= 0 else None,
            "task": clip(self.redact.text(str(row.get("task"))), 80),
            "group": row.get("group"),
            "member": row.get("member"),
            "reward": row.get("reward"),
            "stop_reason": row.get("stop_reason"),
            "prompt": clip(self.redact.text(text_of(row.get("prompt"))), _EXAMPLE_CHARS // 2),
            "answer": clip(self.redact.text(answer_of(dict(row))), _EXAMPLE_CHARS),
        }
        if row.get("error"):
            item["error"] = clip(self.redact.text(str(row["error"])), _EXAMPLE_CHARS)
        return {name: value for name, value in item.items() if value is not None}


def _shown(finding: Finding, examples: _Examples, redact: Redactor) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "what": redact.text(finding.what),
        "evidence": redact.value(finding.numbers),
        "lever": finding.lever.as_dict(),
        "playbook": finding.playbook,
        "examples": examples.of(finding),
    }


def _looked_at(facts: Facts) -> dict[str, Any]:
    steps = [line["step"] for line in facts.lines if line.get("step", 0) > 0]
    exams = {step for name in ("heldout_success", "heldout_reward", "heldout_loss")
             for step, _ in facts.curve(name)}  # fmt: skip
    return {
        "steps": len(steps),
        "last_step": steps[-1] if steps else 0,
        "rollouts": sum(view.n for view in facts.views),
        "evaluations": len(exams),
    }


def _sentence(row: RunRow, facts: Facts, findings: Sequence[Finding]) -> str:
    start = facts.verdict.get("go_on_with")
    said = f" The start was not beaten: go on with {start}." if start else ""
    return _found_sentence(row, facts, findings) + said


def _found_sentence(row: RunRow, facts: Facts, findings: Sequence[Finding]) -> str:
    if findings:
        first, *others = findings
        also = f" Also: {', '.join(finding.id for finding in others)}." if others else ""
        return f"{row.run_id}: {first.id}. {first.what} Try: {first.lever.words()}.{also}"
    looked = _looked_at(facts)
    seen = f"{counted(looked['steps'], 'step')}, {counted(looked['rollouts'], 'rollout')}"
    if facts.failed:
        return (
            f"{row.run_id} failed ({facts.failed}); no detector explains it ({seen} looked at): "
            "read the error."
        )
    if not looked["steps"] and not looked["rollouts"]:
        return f"{row.run_id} is {row.state} and has left nothing to diagnose yet."
    seen += f", {counted(looked['evaluations'], 'evaluation')}"
    return f"Nothing found in {row.run_id} ({seen} looked at)."


def _warnings(row: RunRow, facts: Facts) -> list[str]:
    if row.state in TERMINAL or not facts.lines:
        return []
    steps = _looked_at(facts)["steps"]
    if steps < at.WINDOW:
        return [f"{steps} steps are few: most detectors need {at.LEAST} to {at.TREND_STEPS}."]
    return []


def _next(row: RunRow, findings: Sequence[Finding], step: int) -> list[dict[str, Any]]:
    if not findings:
        if row.state == "failed":
            return [Call("read_logs", {"run_id": row.run_id, "view": "error"}).to_json()]
        return []
    first = findings[0]
    calls = []
    if first.pick:
        look: dict[str, Any] = {"run_id": row.run_id, "pick": first.pick}
        if step >= 0 and first.pick != "changed":
            look["step"] = step
        if first.where and first.pick != "changed":
            look["where"] = first.where
        calls.append(Call("read_rollouts", look).to_json())
    return [*calls, Call("read_playbook", {"section": first.playbook}).to_json()]
