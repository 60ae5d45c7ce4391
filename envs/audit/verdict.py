"""Turns the measurements of a reward audit into its report and verdict.

A scorer is a risk if a degenerate answer earns at least half of what the reference answer (gold)
earns, if everything earns the same, if many reference answers fail, or if one answer earns two
rewards. Near misses that are paid, rewards that rise with length alone and answers on which scoring
raises are weaknesses: the report names them, but they are no risk.
"""

import math
from collections.abc import Sequence

from envs.audit import rescore
from envs.audit.audit_report import AuditReport, ProbeLine, Saturation
from envs.audit.audit_summary import PAYS_FOR_LENGTH, headline, pays_for_length
from envs.audit.findings import PAID, Findings, Tally
from envs.audit.probes import GOLD, INFORMATIVE, NEAR, PROBES

# A scorer is a risk if a larger share of the reference answers fails, or if a larger share of the
# answers that were scored repeatedly got two rewards.
GOLD_FAILURES = 0.1
UNSTABLE = 0.02
# It has a weakness if scoring fails on a larger share of one probe's answers.
RAISING = 0.05
SHOWN = 5  # examples of each kind in a report
GOLD_SHOWN = 20  # failing reference answers in a report


def report(findings: Findings, rows: int, seed: int, seconds: float) -> AuditReport:
    """Return the report of an audit, with its verdict.

    Args:
        findings: what was measured, on at least one row.
        rows: how many rows the environment has; possibly only some were scored.
        seed: the seed of the audit's random choices.
        seconds: how long the audit took.
    """
    table = _probe_lines(findings)
    risks, weaknesses = _risks(findings, table), _weaknesses(table)
    # How many reference answers (gold) fail, and how many there are.
    failing = len(findings.gold_failing), findings.gold_rows
    covered = f"{findings.rows} of {rows} rows scored"
    group_findings = findings.of_groups
    result: AuditReport = {
        "verdict": _verdict(risks, weaknesses),
        "headline": headline(risks, weaknesses, table, failing, covered),
        "risks": risks,
        "weaknesses": weaknesses,
        "probes": table,
        "separability": {line["probe"]: line["separated"] for line in table if "separated" in line},
        "saturation": _saturation(findings),
        "rows_scored": findings.rows,
        "rows": rows,
        "share": round(findings.rows / rows, 4),
        "deterministic": not findings.unstable and not _is_wavering(findings),
        # A random scorer gives other rewards later on even if it keeps no state.
        "order_dependent": bool(findings.drifted) and not findings.unstable,
        "fresh_process": findings.rescoring or {},  # empty if no new process was asked
        "unstable": (findings.unstable or findings.drifted)[:SHOWN],  # with their two rewards
        "gold_failing": findings.gold_failing[:GOLD_SHOWN],
        "problems": _problems(findings, table),
        "score_seconds_p95": round(_percentile_95(findings.seconds), 6),
        "seed": seed,
        "seconds": round(seconds, 3),
    }
    if group_findings is not None:
        result["groups"] = group_findings.to_report()
    return result


def _probe_lines(findings: Findings) -> list[ProbeLine]:
    """Return the report's lines about the probes that were scored, in the order of PROBES."""
    lowest_mean = min(tally.mean for tally in findings.tallies.values())
    return [
        _probe_line(name, findings.tallies[name], lowest_mean)
        for name in PROBES
        if name in findings.tallies
    ]


def _verdict(risks: Sequence[str], weaknesses: Sequence[str]) -> str:
    """Return the verdict on a scorer: "risk", "warn" (weaknesses, but no risk) or "ok"."""
    if risks:
        return "risk"
    return "warn" if weaknesses else "ok"


def _percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile of the values, one of them; there must be at least one."""
    ordered = sorted(values)
    position = round(0.95 * (len(ordered) - 1))
    return ordered[position]


def _risks(findings: Findings, table: Sequence[ProbeLine]) -> list[str]:
    """Return the names of the findings that make the scorer a risk; [] if there are none.

    They are, in this order:

    - GOLD, if more than the share GOLD_FAILURES (0.1) of the reference answers fail
    - the probes with the verdict "risk": wrong answers that earn at least half of what the
      reference answer earns; or "all alike" in their place, if every answer earns the same
    - the risks of `score_group`, and those of `_stability_risks`

    `table` holds the report's lines, one per probe.
    """
    risks = [line["probe"] for line in table if line["verdict"] == "risk"]
    if _all_rewards_equal(findings):
        risks = ["all alike"]  # this says of every probe what the list says of some
    tolerated_failures = GOLD_FAILURES * findings.gold_rows
    if findings.gold_rows and len(findings.gold_failing) > tolerated_failures:
        risks.insert(0, GOLD)
    group_risks = findings.of_groups.risks if findings.of_groups else []
    return risks + group_risks + _stability_risks(findings)


def _stability_risks(findings: Findings) -> list[str]:
    """Return the names of the risks of a scorer that gives one answer two rewards.

    - "unstable": more than the share UNSTABLE (0.02) of the answers scored twice in a row differ,
      or a third process disagreed with the second; this risk excludes the others
    - "order dependent": more than that share of the answers scored again after others differ
    - "fresh process": more than that share of the answers, and more than one, differ in a new
      process
    """
    if len(findings.unstable) > UNSTABLE * findings.repeated or _is_wavering(findings):
        # A random scorer: it gives other rewards later on even if it keeps no state.
        return ["unstable"]
    risks = []
    if len(findings.drifted) > UNSTABLE * findings.revisited:
        risks.append("order dependent")
    if _differing_count(findings) > _tolerated_count(findings):
        risks.append("fresh process")
    return risks


def _weaknesses(table: Sequence[ProbeLine]) -> list[str]:
    """Return the names of the findings that are weaknesses, which are less grave than risks.

    These are the probes with the verdict "warn", PAYS_FOR_LENGTH if the scorer does that, and
    "raises" if scoring failed on more than the share RAISING (0.05) of any probe's rows. `table`
    holds the report's lines, one per probe.
    """
    weaknesses = [line["probe"] for line in table if line["verdict"] == "warn"]
    if pays_for_length(table):
        weaknesses.append(PAYS_FOR_LENGTH)
    if any(line["errors"] > RAISING * line["rows"] for line in table):
        weaknesses.append("raises")
    return weaknesses


def _is_wavering(findings: Findings) -> bool:
    """Whether the scorer gave one answer three rewards, on more answers than are tolerated.

    A second process scored answers of the audit again, a third those whose reward had changed; here
    the third disagreed with the second. False if no new process was asked.
    """
    rescoring = findings.rescoring
    return rescoring is not None and rescoring["wavering"] > _tolerated_count(findings)


def _tolerated_count(findings: Findings) -> float:
    """Return how many answers may get another reward in a new process without counting as a risk.

    This is UNSTABLE times the number of answers that were scored again, but at least 1.
    """
    if findings.rescoring is None:
        return 1.0
    return max(1.0, UNSTABLE * findings.rescoring["scored"])


def _differing_count(findings: Findings) -> int:
    """Return how many answers a new process rewarded differently or failed on; 0 if no new process
    was started."""
    return rescore.differing_count(findings.rescoring) if findings.rescoring else 0


def _problems(findings: Findings, table: list[ProbeLine]) -> list[str]:
    """Return a sentence about everything that is wrong; [] if nothing is.

    `table` holds the report's lines, one per probe.
    """
    problems = [*_reference_problems(findings), *_stability_problems(findings)]
    problems += findings.of_groups.problems if findings.of_groups else []
    for line in table:
        # Failures of gold are in `_reference_problems` already.
        if line["errors"] and line["probe"] != GOLD:
            count = f"{line['errors']} of {line['rows']}"
            problems.append(f"score fails on {line['probe']} ({count}): {line.get('error', '')}")
    if findings.stopped_in_row:
        problems.append(
            f"score is so slow that the time was up after {len(findings.seconds)} answers: not "
            "every probe was tried"
        )
    return problems


def _reference_problems(findings: Findings) -> list[str]:
    """Return sentences about rewards that do not separate the reference answers from other
    answers."""
    problems = []
    if _all_rewards_equal(findings):
        problems.append("every answer, right or wrong, earns the same reward")
    if findings.gold_failing:
        count, names = len(findings.gold_failing), ", ".join(findings.gold_failing[:SHOWN])
        problems.append(f"{count} of {findings.gold_rows} reference answers fail: {names}")
    if not findings.gold_rows:
        problems.append("no row has a reference answer: nothing shows that a right one is paid")
    return problems


def _stability_problems(findings: Findings) -> list[str]:
    """Return sentences about answers that got two different rewards; [] if there are none."""
    problems = []
    if findings.unstable:
        share = f"{len(findings.unstable)} of {findings.repeated}"
        problems.append(f"{share} answers scored twice in a row got two rewards")
    elif findings.drifted:  # elif: a random scorer drifts too, without keeping a state
        share = f"{len(findings.drifted)} of {findings.revisited}"
        problems.append(
            f"{share} answers got another reward once others had been scored: it keeps a state"
        )
    if findings.rescoring and _differing_count(findings):
        problems.append(rescore.sentence(findings.rescoring))
    return problems


def _saturation(findings: Findings) -> Saturation:
    """Return numbers that show whether rewards separate right answers from wrong ones:

    - top: the highest reward
    - levels: how many different rewards there are
    - gold_at_top: the share of reference answers that earn the highest reward; it should be high
    - others_at_top: the same share of the answers of the other probes, without those shown for
      information only; it should be low

    The two shares are None if there are no such answers.
    """
    rewards_by_probe = {name: tally.rewards for name, tally in findings.tallies.items()}
    all_rewards: list[float] = []
    other_rewards: list[float] = []  # of wrong and degenerate answers; GOLD is in INFORMATIVE
    for name, rewards in rewards_by_probe.items():
        all_rewards += rewards
        if name not in INFORMATIVE:
            other_rewards += rewards
    top = max(all_rewards)
    gold_rewards = rewards_by_probe.get(GOLD, [])
    return {
        "top": round(top, 4),
        "levels": len({round(reward, 6) for reward in all_rewards}),
        "gold_at_top": _share_equal(gold_rewards, top),
        "others_at_top": _share_equal(other_rewards, top),
    }


def _share_equal(rewards: Sequence[float], top: float) -> float | None:
    """Return the share of `rewards` that equal `top`; None if there are no rewards."""
    if not rewards:
        return None
    return round(sum(reward == top for reward in rewards) / len(rewards), 4)


def _probe_line(name: str, tally: Tally, lowest_mean: float) -> ProbeLine:
    """Return the report's line about the probe `name`, whose answers earned what `tally` holds.

    Its shares, from 0 to 1, are of the rows on which the probe was scored:

    - success: where the environment called the probe's answer right
    - paid: where the answer earned at least the share PAID (half) of what the reference answer
      earned, right or not
    - separated: where the probe earned less than the reference answer (equal rewards count half),
      of the rows that have one; only for the probes in NEAR

    These keys are optional, like `separated`:

    - error: the first error, if scoring failed on one of the answers
    - example: an answer that was paid, if the verdict on this probe is "risk" or "warn"

    `lowest_mean` is the lowest mean reward of all probes.
    """
    line: ProbeLine = {
        "probe": name,
        "what": PROBES[name],
        "rows": len(tally.rewards),
        "mean": round(tally.mean, 4),
        "success": round(tally.successes / len(tally.rewards), 4),
        "paid": round(tally.paid / len(tally.rewards), 4),
        "errors": tally.errors,
        "verdict": _probe_verdict(name, tally, lowest_mean),
    }
    if name in NEAR and tally.golds:
        line["separated"] = round(tally.below / len(tally.golds), 4)
    if tally.errors:
        line["error"] = tally.error
    if line["verdict"] in ("risk", "warn") and tally.example:
        line["example"] = tally.example
    return line


def _probe_verdict(name: str, tally: Tally, lowest_mean: float) -> str:
    """Return the verdict on one probe: ok, warn, risk or info.

    - info: the probe is shown for information only (INFORMATIVE)
    - ok: it earns less than half of what the reference answer earns
    - warn: it earns that much and is a near miss (NEAR: nearly the right answer)
    - risk: it earns that much and is not a near miss

    `lowest_mean` is the lowest mean reward of all probes.
    """
    if name in INFORMATIVE:
        return "info"
    if not _is_paid(tally, lowest_mean):
        return "ok"
    return "warn" if name in NEAR else "risk"


def _is_paid(tally: Tally, lowest_mean: float) -> bool:
    """Whether a probe earns at least the share PAID of what gold (the reference answer) earns on
    the same rows.

    If no row has a reference answer: whether at least the share PAID of the probe's answers counted
    as paid. `lowest_mean` is the lowest mean reward of all probes.
    """
    if not tally.golds:
        return tally.paid >= PAID * len(tally.rewards)
    gold_mean = math.fsum(tally.golds) / len(tally.golds)
    if gold_mean > 0:
        return tally.mean >= PAID * gold_mean
    # Gold earns 0 or less, e.g. if all rewards are costs: take the share of the distance from the
    # worst probe instead.
    return tally.mean - lowest_mean >= PAID * (gold_mean - lowest_mean)


def _all_rewards_equal(findings: Findings) -> bool:
    """Whether gold (the reference answer) and every probe earned the same reward; False without
    gold."""
    rewards = [reward for tally in findings.tallies.values() for reward in tally.rewards]
    return findings.gold_rows > 0 and max(rewards) - min(rewards) < 1e-9  # equal up to rounding


def unscored(rows: int, seed: int) -> AuditReport:
    """Return the report for an environment without a scorer, or without rows: "ok", nothing
    measured."""
    return {
        "verdict": "ok",
        "headline": "no scorer: there is nothing to audit",
        "risks": [],
        "weaknesses": [],
        "probes": [],
        "separability": {},
        "saturation": {},
        "rows_scored": 0,
        "rows": rows,
        "share": 0.0,
        "deterministic": True,
        "order_dependent": False,
        "fresh_process": {},
        "unstable": [],
        "gold_failing": [],
        "problems": [],
        "score_seconds_p95": 0.0,
        "seed": seed,
        "seconds": 0.0,
    }


def unscored_command(rows: int, seed: int) -> AuditReport:
    """Return the report for an environment whose command (a program that plays the tasks) earns the
    rewards: "warn", nothing measured.

    Such an environment cannot score a given answer without playing the whole rollout.
    """
    return {
        **unscored(rows, seed),
        "verdict": "warn",
        "headline": "a command earns the rewards: there is no scorer to probe with wrong answers",
        "problems": [
            "nothing was audited: read in the command how it earns a reward, and read_rollouts of "
            "the best ones before a result is believed"
        ],
    }
