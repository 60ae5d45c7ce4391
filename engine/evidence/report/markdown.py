"""The dossier of a run as Markdown: a report an agent can afford to read, and the model card."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.evidence.report.dossier import Dossier
from engine.evidence.stats.overlap import KINDS
from engine.evidence.stats.results import show, show_change
from engine.home.rows import TERMINAL
from engine.home.sanitize import clip, one_line
from engine.records.lines.curves import main_columns, short, spark

MOST_CHARS = 9_800
# An underscore between letters is no markup in CommonMark, and names are full of them.
_MARKUP = re.compile(r"[\\`*\[\]<>|]|(?<![^\W_])_|_(?![^\W_])")
_WORDS = {
    "better": "Better",
    "worse": "Worse",
    "no_difference": "No difference",
    "inconclusive": "Inconclusive",
    "unknown": "Unknown",
}


@dataclass(frozen=True)
class Headline:
    """`kind` is the verdict, or failed or running; it chooses the colour of the page."""

    word: str
    kind: str


def headline(dossier: Dossier) -> Headline:
    """The word over a report: the verdict, or the state of a run that has none yet."""
    row, verdict = dossier.row, dossier.verdict.word
    if row.state in ("failed", "cancelled"):
        return Headline(row.state.capitalize(), "failed")
    if row.state not in TERMINAL:
        return Headline(row.state.capitalize(), "running")
    if row.kind != "train" and len(dossier.verdict.models) < 2:
        return Headline("Evaluated", "running")
    return Headline(_WORDS[verdict], verdict)


def markdown_of(dossier: Dossier) -> str:
    """The report under 10,000 characters; the last sections go first when it is too long."""
    sections = [
        section
        for make in (
            _title, _verdict, _kept, _flips, _models, _curves, _settings, _audit, _contamination,
            _cost, _lineage, _provenance, _hashes,
        )
        if (section := make(dossier))
    ]  # fmt: skip
    return _joined(sections)


def card_of(dossier: Dossier) -> str:
    """The model card: what it is, how it came to be, how good it is and what is not known."""
    parts: tuple[Callable[[Dossier], str], ...] = (
        _front_matter, _card_title, _verdict, _kept, _models, _card_training, _contamination,
        _card_use, _lineage, _provenance, _hashes, _card_limits, _settings,
    )  # fmt: skip
    sections = [section for make in parts if (section := make(dossier))]
    return _joined(sections)


def duration(hours: float) -> str:
    """Hours as a person says them."""
    seconds = hours * 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{hours:.1f} h"


def size_text(count: float) -> str:
    """Bytes as a person says them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: GB ends the loop")


def value_text(value: object) -> str:
    """A setting or a number as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(value_text(item) for item in value) or "none"
    return str(value)


def sentence_case(text: str) -> str:
    """The text with its first letter large."""
    return text[:1].upper() + text[1:]


def _title(dossier: Dossier) -> str:
    row = dossier.row
    note = one_line(str(dossier.config.get("note") or ""), 300)
    lines = [
        f"# {_plain(row.run_id)}: {headline(dossier).word}",
        f"{row.algorithm} of {_plain(row.model)} on {_plain(row.env_id)}; {row.state}.",
    ]
    if note:
        lines.append(f"Note: {_plain(note)}")
    if row.reason:
        lines.append(f"Reason ({row.reason_kind}): {_plain(dossier.redact.text(row.reason))[:500]}")
    if row.hint:
        lines.append(f"Next: {_plain(dossier.redact.text(str(row.hint)))[:500]}")
    return "\n\n".join(lines)


def _verdict(dossier: Dossier) -> str:
    verdict = dossier.verdict
    lines = ["## Verdict", _plain(verdict.summary)]
    found = dossier.comparison
    if found and found.measure and found.outcome.diff is not None and found.before and found.after:
        outcome, measure = found.outcome, found.measure
        gap = show_change(outcome.detectable, measure).removeprefix("+")
        table = [
            "| | value | 95 % interval | tasks | errors |",
            "|---|---|---|---|---|",
        ]
        names = (dossier.sides.before_name, dossier.sides.after_name) if dossier.sides else ("", "")
        for name, level in zip(names, (found.before, found.after), strict=True):
            table.append(
                f"| {_plain(name)} | {show(level.value, measure)} | {show(level.low, measure)} to "
                f"{show(level.high, measure)} | {level.tasks} | {level.errors} |"
            )
        table.append(
            f"| change | {show_change(outcome.diff, measure)} | "
            f"{show_change(outcome.low, measure)} to {show_change(outcome.high, measure)} "
            f"| {outcome.n} | |"
        )
        lines.append("\n".join(table))
        lines.append(
            f"p = {outcome.p:.3g} ({outcome.method}); the smallest change {outcome.n} tasks would "
            f"show is {gap}{' points' if measure == 'success' else ''}."
        )
    lines += [f"- {_plain(text)}" for text in verdict.warnings]
    if verdict.training and verdict.training.expected:
        came = {True: "as expected", False: "not as expected", None: "open"}
        outcome = came[verdict.training.as_expected]
        lines.append(f"Expected: {verdict.training.expected} ({outcome}).")
    return "\n\n".join(line for line in lines if line)


def _flips(dossier: Dossier) -> str:
    found = dossier.comparison
    if found is None or found.outcome.diff is None or found.measure == "loss":
        return ""
    gained, lost = len(found.outcome.gained), len(found.outcome.lost)
    lines = [f"## What changed\n\n{gained} tasks gained, {lost} lost of {found.outcome.n}."]
    for way, examples in (("gained", dossier.flips.gained), ("lost", dossier.flips.lost)):
        for example in examples[:2]:
            lines.append(
                f"**{way}: {_plain(example.task)}**\n\n"
                + _fenced(f"prompt: {clip(example.prompt, 260)}\n"
                          f"before: {clip(example.before, 260)}\n"
                          f"after:  {clip(example.after, 260)}")
            )  # fmt: skip
    return "\n\n".join(lines)


def _models(dossier: Dossier) -> str:
    measure = dossier.verdict.comparison.measure
    levels = [(each.model, each.level) for each in dossier.verdict.models]
    rows = [
        f"| {_plain(dossier.redact.text(model))} | {show(level.rounded_value, measure)} "
        f"| {show(level.interval[0], measure)} to {show(level.interval[1], measure)} "
        f"| {level.tasks} |"
        for model, level in levels
        if level is not None and level.value is not None and measure in ("success", "reward")
    ]
    if not rows:
        return ""
    head = f"## Models\n\n| model | {measure} | 95 % interval | tasks |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def _curves(dossier: Dossier) -> str:
    if dossier.row.kind != "train":
        return ""
    rows = []
    for name in main_columns(dossier.metrics.columns, 14):
        points = dossier.metrics.curve(name)
        if len(points) > 1:
            values = [value for _, value in points]
            rows.append(
                f"| {_plain(name)} | {short(values[0])} | {short(values[-1])} "
                f"| {short(min(values))} | {short(max(values))} | {spark(values)} |"
            )
    if not rows:
        return ""
    head = "## Curves\n\n| metric | first | last | min | max | over the run |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def _settings(dossier: Dossier) -> str:
    rows = [
        f"| {_plain(name)} | {_plain(value_text(value))[:80]} | {_plain(source)} |"
        for name, value, source in dossier.settings
    ]
    if not rows:
        return ""
    return "\n".join(["## Settings\n\n| setting | value | source |", "|---|---|---|", *rows])


def _audit(dossier: Dossier) -> str:
    audit = dossier.audit
    if not audit.get("headline"):
        return ""
    lines = [f"## Reward audit\n\n{_plain(str(audit['headline']))}"]
    risky = [line for line in audit.get("probes") or [] if line.get("verdict") == "risk"]
    lines += [
        f"- {_plain(str(line.get('probe')))}: earns {value_text(line.get('mean'))} on average"
        for line in risky[:8]
    ]
    return "\n".join(lines)


def _contamination(dossier: Dossier) -> str:
    """What the training rows share with the held-out tasks, by environment trained on."""
    shared = dossier.contamination
    if not shared.headline:
        return ""
    lines = [f"## Contamination\n\n{_plain(shared.headline)}."]
    for source in shared.sources[:6]:
        counts = ", ".join(f"{source.count(kind)} {kind}" for kind in KINDS)
        trained = f" ({_plain(source.run_id)})" if source.run_id else ""
        lines.append(
            f"- {_plain(source.env_id)}{trained}: {counts} of "
            f"{source.heldout or 0} held-out tasks in {source.train or 0} rows"
        )
    if shared.leaked:
        lines.append(f"- {len(shared.leaked)} tasks are left out of the verdict")
    return "\n".join(lines)


def _cost(dossier: Dossier) -> str:
    cost, sentences = dossier.cost, []
    if cost.actual is not None:
        sentences.append(f"Used {duration(cost.actual)} of device time.")
    if cost.likely is not None and cost.low is not None and cost.high is not None:
        sentences.append(
            f"Estimated {duration(cost.likely)} ({duration(cost.low)} to {duration(cost.high)})."
        )
    if cost.price and cost.actual is not None:
        sentences.append(f"{cost.price * cost.actual:.2f} at {cost.price:g} an hour.")
    return "## Cost\n\n" + " ".join(sentences) if sentences else ""


def _lineage(dossier: Dossier) -> str:
    stations = [
        f"{_plain(station.name)}"
        + (f" ({_plain(station.detail)})" if station.detail else "")
        + (f": {station.verdict}" if station.verdict else "")
        for station in dossier.lineage
    ]
    head = "Lineage" if dossier.row.kind == "train" else "Evaluated"
    return f"## {head}\n\n" + "\n".join(f"{i}. {text}" for i, text in enumerate(stations, 1))


def _kept(dossier: Dossier) -> str:
    """What the model could do before, by battery."""
    kept = dossier.verdict.kept_skills
    if kept is None or not kept.every_battery:
        return ""
    lines = [
        f"| {_plain(each.battery)} | {value_text(each.before)} | {value_text(each.after)} "
        f"| {each.n} | {each.lost} | {each.verdict} |"
        for each in kept.every_battery
    ]
    head = "## Kept skills\n\n| asked | before | after | tasks | lost | |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


def _provenance(dossier: Dossier) -> str:
    """The sealed links, each resting on the one before it."""
    sealed = dossier.provenance
    if sealed is None or not sealed.links:
        return ""
    lines = [
        f"{number}. {_plain(link.name)}: {len(link.files)} files, `{link.hash[:16]}`"
        for number, link in enumerate(sealed.links, 1)
    ]
    verify = f"`honesmith verify {dossier.row.run_id}`"
    after = f"Head: `{sealed.head}`. {verify} reads every file again and names what changed."
    return "## Chain\n\n" + "\n".join(lines) + f"\n\n{after}"


def _hashes(dossier: Dossier) -> str:
    rows = [f"- {_plain(what)}: `{digest[:64]}`" for what, digest in dossier.hashes]
    return "## Hashes\n\n" + "\n".join(rows) if rows else ""


def _front_matter(dossier: Dossier) -> str:
    base = str((dossier.config.get("base") or {}).get("ref") or dossier.row.model)
    tags = ["lora", "honesmith", dossier.row.algorithm]
    lines = [f"base_model: {json.dumps(base)}", "library_name: peft", f"tags: {json.dumps(tags)}"]
    return "\n".join(["---", *lines, "---"])


def _card_title(dossier: Dossier) -> str:
    row = dossier.row
    when = time.strftime("%Y-%m-%d", time.gmtime(row.ended or row.created))
    return (
        f"# {_plain(row.run_id)}\n\nA LoRA adapter trained by {row.algorithm} from "
        f"{_plain(row.model)} on the environment {_plain(row.env_id)}, {when}."
        if row.kind == "train"
        else f"# {_plain(row.run_id)}\n\nAn evaluation on {_plain(row.env_id)}, {when}."
    )


def _card_training(dossier: Dossier) -> str:
    if dossier.row.kind != "train":
        return ""
    seed = dossier.manifest.get("seed", (dossier.config.get("settings") or {}).get("seed"))
    lines = [
        "## Training",
        f"- algorithm: {dossier.row.algorithm}",
        f"- started from: {_plain(str(dossier.config.get('model') or dossier.row.model))}",
        f"- environment: {_plain(dossier.row.env_id)}",
        f"- seed: {value_text(seed)}",
        f"- precision: {value_text(dossier.manifest.get('precision', 'not recorded'))}",
    ]
    audit = dossier.audit.get("headline")
    if audit:
        lines.append(f"- reward audit: {_plain(str(audit))}")
    if (dossier.config.get("settings") or {}).get("accept_reward_risk"):
        lines.append("- the reward audit failed and was overruled (accept_reward_risk)")
    if dossier.cost.actual is not None:
        lines.append(f"- device time: {duration(dossier.cost.actual)}")
    return lines[0] + "\n\n" + "\n".join(lines[1:])


def _card_use(dossier: Dossier) -> str:
    if dossier.row.kind != "train" or dossier.run.latest_checkpoint() is None:
        return ""
    which = "@best" if dossier.run.resolve_checkpoint("best") else ""
    return (
        f'## Use\n\n`deploy(run_id="{dossier.row.run_id}{which}")` serves it over an '
        f'OpenAI-compatible address; with `action="export"` it writes the adapter as a PEFT folder.'
    )


def _card_limits(dossier: Dossier) -> str:
    known = dossier.verdict.comparison.outcome.n
    return (
        "## What is not known\n\n"
        f"The verdict rests on {known} held-out tasks of this one environment version. It says "
        "nothing about other tasks, about skills that were not evaluated, or about safety."
    )


def _joined(sections: Sequence[str]) -> str:
    """The sections under the limit: the first whole one that no longer fits ends it."""
    text = ""
    for index, section in enumerate(sections):
        if len(text) + len(section) + 160 > MOST_CHARS:
            room = MOST_CHARS - len(text) - 160
            if index == 0 or room > 400:
                text += _whole_lines(section, room)
            names = [part.partition("\n")[0].lstrip("# ") for part in sections[index:]]
            return text + f"\n\nLeft out for length: {', '.join(names)[:100]}.\n"
        text += ("\n\n" if text else "") + section
    return text + "\n"


def _whole_lines(section: str, room: int) -> str:
    kept = ["", ""]
    for line in section.split("\n"):
        room -= len(line) + 1
        if room < 0 or line.startswith("```"):
            break
        kept.append(line)
    return "\n".join(kept)


def _fenced(text: str) -> str:
    """Untrusted text in a fence longer than any it contains."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"


def _plain(text: str) -> str:
    """Untrusted text inside a line of Markdown: no markup, no table cell broken."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
