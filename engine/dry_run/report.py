"""Makes the reply to a dry run: the results of its checks, in words and in numbers."""

import hashlib
import json
from collections.abc import Sequence

from engine.core.format import whole_percent, words
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.cost import estimate
from engine.cost.hours import WIDE_NOTE, narrowing_call
from engine.dry_run.checks import DryRun
from engine.dry_run.judgements import required, short_audit
from engine.environments import registry
from engine.settings.defaults import RECIPE

_FIX_CHARS = 240  # the most characters of advice in the summary
_LEFT_OUT = ("sources", "row")  # fields that a short reply leaves out
_EMPTY_VALUES = (None, "", [], {})  # values of fields that a short reply leaves out
_TRIED = ("probe", "smoke", "exam")  # checks whose details matter even if they pass
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
        "reflection",
        "max_rollouts",
        "max_calls",
        "select_rows",
    }
)
_FAULTY = ("warn", "risk")  # verdicts of audit probes that stay in a shortened reply
_ESTIMATE_KEYS = ("hours", "money", "fits", "basis")  # what a short reply keeps of an estimate
_HASH_CHARS = 16  # digits of the report's SHA-256, enough to tell two reports apart


def report_of(run: DryRun) -> Reply:
    """Return the parts of the reply that are known before the model is tried (by a probe of its
    answers or a smoke run of two steps).

    One of them is `report_hash`, which is the same whenever the same call is made again.
    """
    facts = run.facts
    resolved, forecast = facts.resolved, facts.forecast
    # Without the time that the audit took, because that differs from call to call.
    audit = {key: value for key, value in facts.audit.items() if key != "seconds"}
    report = {
        "settings": resolved.settings.model_dump() if resolved else {},
        "sources": resolved.sources if resolved else {},
        "batch_size_is": _why_this_batch_size(run),
        "statistics": facts.statistics,
        "row": facts.row,
        "audit": short_audit(audit),
        "exam": facts.exam.to_json() if facts.exam else {},
        "estimate": estimate.shown(forecast.estimate) if forecast else {},
    }
    return report | {"report_hash": _report_hash(run, report)}


def _why_this_batch_size(run: DryRun) -> str:
    """Say how the default batch size follows from the number of rows; "" if the user gave the
    batch size, or if the run has none."""
    resolved, rows = run.facts.resolved, run.facts.rows
    if resolved is None or rows is None or resolved.sources.get("batch_size") != RECIPE:
        return ""
    if run.algorithm == "dpo":
        count, rule = rows.paired_rows, "an eighth of them, at most 32"
    else:
        count, rule = rows.answered_rows, "8 to 32, for enough steps"
    return f"from the {count:,} rows ({rule}): it moves with them unless given"


def _report_hash(run: DryRun, report: Reply) -> str:
    """Return a hash, in hex, of those parts of the report that are the same in every equal call.

    The estimate and the times of the audit are left out: they change with the free memory, the free
    disk and the speed of the machine.
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
    """Return the parts of the reply with the results of all checks, also of probe and smoke run."""
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
    """Return the summary of the dry run in one sentence, the most important part first.

    If checks fail, it is "Not ready: " with the first of them. Otherwise it says that GRPO would
    learn little, or "Ready to train, about 12 min"; then come the names of the checks that warn,
    and what to do about the first of them.
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
    """Say that the run can begin, and its estimated time: "Ready to train, about 12 min"."""
    figures = required(run.facts.forecast).estimate
    sentence = f"Ready to train, about {words(figures.hours.likely)}"
    if figures.basis != "model":  # "model": a table of speeds, because nothing was measured
        return sentence
    band = f"{words(figures.hours.low)} to {words(figures.hours.high)}"
    wide_note = f"; {WIDE_NOTE}" if _narrowing_call(run) else ""
    return f"{sentence} by a table ({band}: this machine is not measured yet{wide_note})"


def _narrowing_call(run: DryRun) -> Call | None:
    """Return the call (a dry run with two real steps) that narrows a wide range of hours.

    Returns None if the range is narrow, if those steps were asked for now (then the check "smoke"
    tells about them), or while a probe goes on.
    """
    if run.check_list.has("smoke") or _is_probe_unfinished(run):
        return None
    figures = required(run.facts.forecast).estimate
    return narrowing_call(run.home, figures.hours, figures.basis, run.arguments())


def _is_probe_unfinished(run: DryRun) -> bool:
    """Return whether a probe was started and has not ended in the time of the call: its check is
    then skipped, and its run goes on."""
    return bool(run.facts.probe_run_id) and run.check_list.status("probe") == "skip"


def _little_to_learn(run: DryRun) -> str:
    """Say that GRPO would learn little because tasks are too hard, and what helps.

    A group of the probe holds all answers to one task.
    """
    probe = required(run.facts.probe)
    first_step = "train by SFT first" if run.sft_arguments() else "give partial credit"
    hard_share = whole_percent(probe["too_hard"])
    return (
        f"GRPO would learn little: {hard_share} of {probe['tasks']} groups are too hard; "
        f"{first_step}, or take easier tasks"
    )


def _next_calls(run: DryRun) -> list[Call]:
    """Return the calls to suggest next:

    - if a check failed: what mends it, or the section of the playbook about it.
    - if GRPO would learn little: SFT, if possible, and the answers of the probe.
    - otherwise: what narrows a wide range of hours; wait for an unfinished probe; submit the run.
    """
    check_list, facts = run.check_list, run.facts
    if check_list.failed:
        return check_list.remedies
    if facts.too_hard:
        sft_arguments = run.sft_arguments()  # {} if SFT is impossible
        calls = [Call("submit_train", sft_arguments)] if sft_arguments else []
        return [*calls, Call("read_rollouts", {"run_id": facts.probe_run_id, "pick": "best"})]
    calls = [Call("submit_train", run.arguments())]
    if _is_probe_unfinished(run):
        calls.insert(0, Call("wait_run", {"run_id": facts.probe_run_id}))
    narrowing = _narrowing_call(run)
    return [narrowing, *calls] if narrowing else calls


def _warnings(run: DryRun) -> list[str]:
    """List the warnings of the reply: one for every check that warns. If `env_id` was only the
    beginning of an id, a first warning says which environment was taken.
    """
    record = run.facts.record
    prefix_warnings = registry.prefix_warning(run.env_id, record) if record else []
    warned = [check for check in run.check_list.checks if check.status == "warn"]
    return prefix_warnings + [f"{check.name}: {check.detail}" for check in warned]


def shortened(reply: Reply) -> Reply:
    """Return the reply to a dry run (of a run or a plan) without what is rarely read. Its field
    `left_out` says how to see that.

    Left out are checks that passed (their number stays in `passed`), details that a warning
    repeats, the sentence about the exam (the check of that name has it), settings that hardly
    anybody changes, the sources of settings, the row as it is trained, probes of the audit without
    a fault, the parts of the estimate, and counts of 0.
    """
    if "checks" not in reply:
        return reply
    head = {name: reply[name] for name in ("summary", "next", "warnings") if name in reply}
    short = head | {
        name: value
        for name, value in reply.items()
        if name not in _LEFT_OUT and value not in _EMPTY_VALUES
    }
    shown_checks = [check for check in reply["checks"] if _is_shown(check)]
    short["checks"] = [_shortened_check(check, reply["warnings"]) for check in shown_checks]
    if len(shown_checks) < len(reply["checks"]):
        short["passed"] = len(reply["checks"]) - len(shown_checks)
    if "steps" in reply:  # only the reply about a plan has steps
        short["steps"] = _shortened_steps(reply["steps"])
    else:
        sources = reply.get("sources") or {}
        short["settings"] = _shortened_settings(reply.get("settings") or {}, sources)
        short["statistics"] = _shortened_statistics(reply.get("statistics") or {})
        if short.get("exam"):
            short["exam"] = {name: short["exam"][name] for name in short["exam"] if name != "about"}
        short["audit"] = _shortened_audit(reply.get("audit") or {})
        short["estimate"] = _shortened_estimate(reply.get("estimate") or {})
    return short | {"left_out": "other settings, sources, what passed, the row: full=true"}


def _shortened_steps(steps: Sequence[Reply]) -> list[Reply]:
    """Return the entries of a plan's runs, the first run of each step with fewer settings.

    The other runs of a step show only the settings that differ from the first, so these stay.
    """
    short: list[Reply] = []
    shown_steps: set[object] = set()  # numbers of the steps that already had a run
    for step in steps:
        if step["step"] not in shown_steps and "settings" in step:
            step = step | {"settings": _shortened_settings(step["settings"], {})}
        shown_steps.add(step["step"])
        short.append(step)
    return short


def _is_shown(check: Reply) -> bool:
    """Return whether a shortened reply shows a check: if it failed or warns, or if it measured
    something (`_TRIED`)."""
    return check["status"] not in ("pass", "skip") or check["name"] in _TRIED


def _shortened_settings(settings: Reply, sources: Reply) -> Reply:
    """Return the settings that matter in most runs, and those that the user gave. `sources` maps
    each setting to where its value comes from."""
    return {
        name: value
        for name, value in settings.items()
        if name in _SHOWN_SETTINGS or sources.get(name) == "user"
    }


def _shortened_statistics(statistics: Reply) -> Reply:
    """Return the statistics of the rows without what says little: counts of 0, the smallest
    lengths, a 95th percentile that equals the maximum, and `counted` if all rows were counted."""
    short = {}
    for name, value in statistics.items():
        if isinstance(value, dict):  # lengths: {"min", "p50", "p95", "max"}
            left_out = {"min"}
            if value.get("p95") == value.get("max"):
                left_out.add("p95")
            value = {key: length for key, length in value.items() if key not in left_out}
        counts_all_rows = name == "counted" and value == statistics.get("rows")
        if value and not counts_all_rows:
            short[name] = value
    return short


def _shortened_audit(audit: Reply) -> Reply:
    """Return the verdict and the headline of a reward audit, and those of its probes (wrong answers
    that were tried) that warn or show a risk."""
    short = {key: audit[key] for key in ("verdict", "headline") if key in audit}
    faulty = [probe for probe in audit.get("probes", []) if probe.get("verdict") in _FAULTY]
    return short | ({"probes": faulty} if faulty else {})


def _shortened_estimate(figures: Reply) -> Reply:
    """Return the main figures of an estimate. Of the peak memory only the total in bytes is kept;
    money is kept only if a GPU-hour has a price."""
    short = {key: figures[key] for key in _ESTIMATE_KEYS if key in figures}
    if figures.get("peak_memory"):
        short["peak_memory"] = figures["peak_memory"]["total"]
    if not figures.get("gpu_hour_price"):
        short.pop("money", None)
    return short


def _shortened_check(check: Reply, warnings: Sequence[str]) -> Reply:
    """Return a check without empty fields, and without its detail if a warning contains that."""
    detail = check["detail"]
    is_in_warning = bool(detail) and any(detail in warning for warning in warnings)
    return {
        name: value
        for name, value in check.items()
        if value not in _EMPTY_VALUES and not (name == "detail" and is_in_warning)
    }
