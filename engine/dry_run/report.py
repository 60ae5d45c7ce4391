"""The reply to a dry run: what its checks came to, in words and in numbers."""

import hashlib
import json
from collections.abc import Sequence

from engine.core.format import whole_percent, words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost import estimate
from engine.dry_run.checks import DryRun
from engine.environments import registry
from engine.judgements import required, short_audit

_FIX_CHARS = 240  # of the advice in the summary
# What a short reply leaves out, and what it keeps of an estimate.
_LEFT_OUT = ("sources", "row")
_NONE = (None, "", [], {})
_TRIED = ("probe", "smoke", "exam")  # checks that say more than passed
_SHOWN_SETTINGS = frozenset(
    {
        "steps",
        "epochs",
        "learning_rate",
        "batch_size",
        "keep",
        "eval_every",
        "eval_rows",
        "skill_rows",
        "stop_early",
        "max_length",
        "lora_rank",
        "prompts_per_step",
        "group_size",
        "max_tokens",
        "temperature",
        "kl_coef",
        "loss",
        "thinking",
        "max_turns",
        "beta",
        "teacher",
    }
)
_FAULTY = ("warn", "risk")  # verdicts of audit probes that stay in a shortened reply
_ESTIMATE_KEYS = ("hours", "money", "fits", "basis")
_HASH_CHARS = 16  # of the report's SHA-256: enough to tell two reports apart


def report_of(run: DryRun) -> Reply:
    """Return the parts of the reply that are known without the probe.

    Among them is `report_hash`, which is the same for the same call.
    """
    facts = run.facts
    resolved, forecast = facts.resolved, facts.forecast
    audit = {key: value for key, value in facts.audit.items() if key != "seconds"}
    report = {
        "settings": resolved.settings.model_dump() if resolved else {},
        "sources": resolved.sources if resolved else {},
        "statistics": facts.statistics,
        "row": facts.row,
        "audit": short_audit(audit),
        "exam": facts.exam.to_json() if facts.exam else {},
        "estimate": estimate.shown(forecast.estimate) if forecast else {},
    }
    return report | {"report_hash": _report_hash(run, report)}


def _report_hash(run: DryRun, report: Reply) -> str:
    """Hash the report's parts that do not change from call to call; return hexadecimal text.

    It leaves out the estimate and the times of the audit, because free memory, free disk and times
    do change.
    """
    facts = run.facts
    record, model = facts.record, facts.model
    stable = {
        "env_id": record.env_id if record else run.env_id,
        "model": [model.ref, str(model.adapter), model.facts.params] if model else run.model,
        "algorithm": run.algorithm,
        "given": run.settings,
        "checks": [(check.name, check.status) for check in run.check_list.checks],
        "settings": report["settings"],
        "sources": report["sources"],
        "statistics": report["statistics"],
        "audit": {key: value for key, value in facts.audit.items() if "seconds" not in key},
    }
    text = json.dumps(stable, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS]


def results_of(run: DryRun) -> Reply:
    """Return the parts of the reply that tell what the checks came to, the probe included."""
    return {
        "checks": [check.to_json() for check in run.check_list.checks],
        "probe": run.facts.probe,
        "smoke": run.facts.smoke,
        "run_id": run.facts.probe_run_id,
        "summary": _summary(run),
        "next": [call.to_json() for call in _next_calls(run)],
        "warnings": _warnings(run),
    }


def _summary(run: DryRun) -> str:
    """Say in one sentence what the dry run came to, what matters first.

    `Not ready: ...` with the first check that fails; else that GRPO would learn little, or `Ready
    to train, about 12 min`, each followed by the names of the checks that warn and by what to do
    about the first of them.
    """
    failed = run.check_list.failed
    if failed:
        count_note = f" ({len(failed)} checks fail)" if len(failed) > 1 else ""
        return f"Not ready: {failed[0].name}: {failed[0].detail}{count_note}."
    sentence = _little_to_learn(run) if run.facts.too_hard else _ready_sentence(run)
    warned = [check for check in run.check_list.checks if check.status == "warn"]
    if not warned:
        return f"{sentence}."
    names = ", ".join(check.name for check in warned)
    fix = warned[0].fix.text
    first_fix = f": {fix[:_FIX_CHARS]}" if fix else "."
    return f"{sentence}; look at {names}{first_fix}"


def _ready_sentence(run: DryRun) -> str:
    """That training can begin and how long it takes, such as "Ready to train, about 12 min",
    without a full stop."""
    figures = required(run.facts.forecast).estimate
    sentence = f"Ready to train, about {words(figures.hours.likely)}"
    if figures.basis != "model":
        return sentence
    between = f"{words(figures.hours.low)} to {words(figures.hours.high)}"
    return f"{sentence} by a table ({between}: this machine is not measured yet)"


def _little_to_learn(run: DryRun) -> str:
    """Say that GRPO would learn little, because the tasks are too hard, and what helps.

    A group of the probe holds the answers to one task.
    """
    probe = required(run.facts.probe)
    first_step = "train by SFT first" if run.sft_arguments() else "give partial credit"
    return (
        f"GRPO would learn little: {whole_percent(probe['too_hard'])} of {probe['tasks']} "
        "groups are too "
        f"hard; {first_step}, or take easier tasks"
    )


def _next_calls(run: DryRun) -> list[Call]:
    """The calls to suggest next.

    - Where a check failed: what mends it, or the section of the playbook about it.
    - Where GRPO would learn little: SFT, if possible, and the probe's answers.
    - Otherwise: wait for an unfinished probe; submit the run.
    """
    check_list, facts = run.check_list, run.facts
    if check_list.failed:
        return check_list.remedies
    if facts.too_hard:
        sft = run.sft_arguments()
        calls = [Call("submit_train", sft)] if sft else []
        return [*calls, Call("read_rollouts", {"run_id": facts.probe_run_id, "pick": "best"})]
    calls = [Call("submit_train", run.arguments())]
    # `check_probe` returns "skip" for a probe that has not ended in time.
    if facts.probe_run_id and check_list.status("probe") == "skip":  # it goes on
        calls.insert(0, Call("wait_run", {"run_id": facts.probe_run_id}))
    return calls


def _warnings(run: DryRun) -> list[str]:
    """List the warnings of the reply.

    The first says which environment was meant, where `env_id` was only the beginning of an id; then
    comes one for every check with a warning.
    """
    record = run.facts.record
    prefix_warnings = registry.prefix_meant(run.env_id, record) if record else []
    warned = [check for check in run.check_list.checks if check.status == "warn"]
    return prefix_warnings + [f"{check.name}: {check.detail}" for check in warned]


def shortened(reply: Reply) -> Reply:
    """Return the reply to a dry run of a run or a plan without what is rarely read; `left_out` says
    how to see that.

    Left out are checks that passed (their names stay in `passed`), what a warning says already,
    settings that hardly anybody changes, where each setting comes from, the row as it is trained,
    faultless probes of the audit, the parts of the estimate, and counts of 0.
    """
    if "checks" not in reply:
        return reply
    head = {name: reply[name] for name in ("summary", "next", "warnings") if name in reply}
    short = head | {
        name: value for name, value in reply.items() if name not in _LEFT_OUT and value not in _NONE
    }
    shown = [check for check in reply["checks"] if _is_shown(check)]
    short["checks"] = [_shortened_check(check, reply["warnings"]) for check in shown]
    if len(shown) < len(reply["checks"]):
        passed = [check["name"] for check in reply["checks"] if check not in shown]
        short["passed"] = ", ".join(passed)
    if "steps" in reply:  # a plan
        short["steps"] = _shortened_steps(reply["steps"])
    else:
        sources = reply.get("sources") or {}
        short["settings"] = _shortened_settings(reply.get("settings") or {}, sources)
        short["statistics"] = _shortened_statistics(reply.get("statistics") or {})
        short["audit"] = _shortened_audit(reply.get("audit") or {})
        short["estimate"] = _shortened_estimate(reply.get("estimate") or {})
    return short | {"left_out": "other settings, sources, what passed, the row: full=true"}


def _shortened_steps(steps: Sequence[Reply]) -> list[Reply]:
    """The runs of a plan with fewer settings; a run that varies an earlier one of its step has only
    those that differ, and they stay."""
    short: list[Reply] = []
    seen: set[object] = set()  # numbers of steps
    for step in steps:
        if step["step"] not in seen and "settings" in step:
            step = step | {"settings": _shortened_settings(step["settings"], {})}
        seen.add(step["step"])
        short.append(step)
    return short


def _is_shown(check: Reply) -> bool:
    """Whether a short reply shows a check by more than its name: it did not pass, or it tried or
    measured something."""
    return check["status"] not in ("pass", "skip") or check["name"] in _TRIED


def _shortened_settings(settings: Reply, sources: Reply) -> Reply:
    """The settings that decide most runs, and those that the user gave."""
    return {
        name: value
        for name, value in settings.items()
        if name in _SHOWN_SETTINGS or sources.get(name) == "user"
    }


def _shortened_statistics(statistics: Reply) -> Reply:
    """The statistics of the rows without counts of 0 and the smallest lengths."""
    short = {}
    for name, value in statistics.items():
        if isinstance(value, dict):
            value = {key: count for key, count in value.items() if key != "min"}
        if value:
            short[name] = value
    return short


def _shortened_audit(audit: Reply) -> Reply:
    """Return the verdict and the headline of an audit, and its probes that warn or show a risk."""
    short = {key: audit[key] for key in ("verdict", "headline") if key in audit}
    faulty = [probe for probe in audit.get("probes", []) if probe.get("verdict") in _FAULTY]
    return short | ({"probes": faulty} if faulty else {})


def _shortened_estimate(figures: Reply) -> Reply:
    """Return the main figures of an estimate.

    Of the peak memory only the total in bytes is kept, and money only where a GPU-hour has a price.
    """
    short = {key: figures[key] for key in _ESTIMATE_KEYS if key in figures}
    if figures.get("peak_memory"):
        short["peak_memory"] = figures["peak_memory"]["total"]
    if not figures.get("gpu_hour_price"):
        short.pop("money", None)
    return short


def _shortened_check(check: Reply, warnings: Sequence[str]) -> Reply:
    """A check without its detail where a warning holds that already, and without empty fields."""
    is_said = any(check["detail"] in warning for warning in warnings) if check["detail"] else False
    return {
        name: value
        for name, value in check.items()
        if value not in _NONE and not (name == "detail" and is_said)
    }
