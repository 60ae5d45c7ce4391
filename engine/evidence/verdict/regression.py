"""Kept skills: did the training break something the model could do before?

The trainer asks the same few dozen tasks at step 0 and with the checkpoint it chose. Here the two
are compared battery by battery (a battery is a set of tasks). "forgotten" means significantly
worse, task by task; "inconclusive" means that the difference may be a loss or chance. If there is
no loss, the sentence names the smallest loss that would have shown. If a run of SFT or GRPO forgot,
the remedy is the next larger value of `keep`, the share of replayed rows.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal

from engine.core.hints import Call
from engine.evidence.stats.inference import ALPHA, PairedVerdict, holm, paired_verdict
from engine.evidence.stats.results import Measure, rounded, rounded_ends, show, show_change, side
from engine.evidence.verdict.comparison import LostOfRight, mean_reward, p_of_loss, worst_kind
from engine.evidence.verdict.lineage import ancestry, started_from
from engine.home.run_dir import Home, RunDir
from engine.records.env_version import EnvVersion
from engine.records.known_settings import KnownSettings
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.manifest import ReplayUsed, read_manifest
from engine.records.record import DamagedRecord
from engine.records.run_config import GRPOConfig, RunConfig, SFTConfig

Word = Literal["forgotten", "unknown", "inconclusive", "improved", "kept"]
# The worst first: a run's word is that of its worst battery.
WORDS: tuple[Word, ...] = ("forgotten", "unknown", "inconclusive", "improved", "kept")
# Twice the usual level. A loss with a p below this is significant in a one-sided test, so the
# verdict must not be "kept".
_MAYBE_LOST = 2 * ALPHA
_NAMED = 5  # skills named in a sentence
# The shares of replayed rows to try one after the other while skills are still lost.
# benchmarks/RESULTS.md shows what they cost and how much they save.
_SHARES = (0.2, 0.35, 0.5)


@dataclass(frozen=True)
class Skill:
    """One kind of task before and after training.

    Attributes:
        before, after: mean reward; None if nothing was scored.
        lost_of_right: how many tasks that were right before are wrong now; None if no task was
            right before, or if nothing says which answers are right.
        is_lost: whether it is significantly worse by itself, corrected for the number of skills.
    """

    skill: str
    before: float | None
    after: float | None
    lost_of_right: LostOfRight | None = None
    is_lost: bool = False

    @property
    def lost(self) -> bool:
        """Whether the mean reward fell. A side that was not scored counts as 0."""
        return (self.after or 0.0) < (self.before or 0.0)


@dataclass(frozen=True)
class Battery:
    """One set of tasks that the model was asked before and after training, with the comparison.

    Attributes:
        battery: the name of the set.
        metric: what is compared, success or reward.
        before, after: the mean of `metric` on each side; None if nothing was compared.
        difference: after - before.
        interval: low and high end of the 95 % interval of the difference.
        gained, lost: how many of the `n` tasks became better or worse.
        smallest_detectable_gap: the smallest difference that `n` tasks would show.
        reason: why the verdict is unknown, else "".
        skills: the means by kind of task, the largest loss first; () if all tasks are of one kind.
        lost_of_right: how many tasks that were right before are wrong now; None if no task was
            right before, or if nothing says which answers are right.
        of_tasks: if the battery is a sample of an environment's tasks, how many tasks that has;
            else None.
    """

    battery: str
    verdict: Word
    metric: Measure
    before: float | None
    after: float | None
    difference: float | None
    interval: Sequence[float | None]
    n: int
    gained: int
    lost: int
    smallest_detectable_gap: float | None
    reason: str
    skills: Sequence[Skill]
    lost_of_right: LostOfRight | None = None
    of_tasks: int | None = None

    @property
    def lost_skill(self) -> Skill | None:
        """The skill that lost most among those that are significantly worse by themselves; None if
        there is none."""
        lost_skills = [skill for skill in self.skills if skill.is_lost and skill.lost_of_right]
        return lost_skills[0] if lost_skills else None  # the largest loss comes first

    def to_json(self) -> dict[str, object]:
        """The results of the battery (set of tasks) as a JSON object; "of_tasks" is left out if it
        is None."""
        body = asdict(self)
        if self.of_tasks is None:
            del body["of_tasks"]
        return body


@dataclass(frozen=True)
class SinceBase:
    """The comparison of a run's model with the base model from which a chain of runs began.

    Attributes:
        base: the model that the first run of the chain began with.
        lost_by: ids of the runs of the chain (this one included) that forgot something themselves.
    """

    base: str
    verdict: Word
    batteries: Sequence[Battery]
    summary: str
    lost_by: Sequence[str]

    def to_json(self) -> dict[str, object]:
        """The comparison as a JSON object, as stored results hold it."""
        return {
            "base": self.base,
            "verdict": self.verdict,
            "batteries": [battery.to_json() for battery in self.batteries],
            "summary": self.summary,
            "lost_by": list(self.lost_by),
        }


@dataclass(frozen=True)
class KeptSkills:
    """What a training run did to the skills that the model had before.

    Attributes:
        verdict: the verdict of the worst battery (set of tasks).
        against_base: the comparison with the base model; None if the run itself began with the base
            model.
        replayed: the rows that `keep` replayed; None if `keep` was 0.
    """

    verdict: Word
    batteries: Sequence[Battery]
    summary: str = ""
    against_base: SinceBase | None = None
    replayed: ReplayUsed | None = None

    @property
    def every_battery(self) -> list[Battery]:
        """The batteries (sets of tasks) compared with the run's own start, then those compared with
        its base model; the names of the latter end with ", against <base model>"."""
        base = self.against_base
        if base is None:
            return list(self.batteries)
        since_base = [
            replace(battery, battery=f"{battery.battery}, against {base.base}")
            for battery in base.batteries
        ]
        return [*self.batteries, *since_base]

    def to_json(self) -> dict[str, object]:
        """The comparison as a JSON object; `against_base` and `replayed` are left out if they are
        None."""
        body: dict[str, object] = {
            "verdict": self.verdict,
            "batteries": [battery.to_json() for battery in self.batteries],
            "summary": self.summary,
        }
        if self.against_base:
            body["against_base"] = self.against_base.to_json()
        if self.replayed:
            body["replayed"] = self.replayed.to_json()
        return body


def kept_skills(run_dir: RunDir) -> KeptSkills | None:
    """Compare the skills of a training run's model before and after training.

    Returns None if the run did not ask the tasks that measure them. Raises DamagedRecord if the
    stored answers cannot be read.
    """
    before = read_evaluation(run_dir.kept("before"))
    after = read_evaluation(run_dir.kept("after"))
    if not before:
        return None
    skills = compare_skills(before, after, _tasks_to_ask(run_dir.home, before))
    replayed = _replayed(run_dir)
    summary = f"{skills.summary} {replayed.sentence}" if replayed else skills.summary
    return replace(
        skills, summary=summary, against_base=_compared_with_base(run_dir, after), replayed=replayed
    )


def _replayed(run_dir: RunDir) -> ReplayUsed | None:
    """The rows that a run replayed (answers of its start model, trained on again to keep skills).
    Returns None if it replayed none, or if it has no manifest."""
    config = run_dir.find_config()
    if not isinstance(config, SFTConfig | GRPOConfig) or not config.settings.keep:
        return None
    return read_manifest(run_dir.manifest).replayed if run_dir.manifest.exists() else None


def _tasks_to_ask(home: Home, rows: Sequence[EvaluationRow]) -> dict[str, int]:
    """How many tasks each battery (set of tasks) of `rows` is a sample of, for batteries that are
    environments: the environment's held-out tasks, or all its tasks if none is held out.

    The key is the battery's name, such as "sums@3f2a". Environments that are gone are left out.
    """
    counts = {}
    for battery in {str(row.battery) for row in rows}:
        env_name, _, digest = battery.partition("@")
        if not digest:  # not an environment, but the skill questions, of which all are asked
            continue
        with suppress(OSError, DamagedRecord):
            version = EnvVersion.read(home.envs / env_name / digest / "env.json")
            counts[battery] = version.rows.get("heldout") or sum(version.rows.values())
    return counts


def compare_skills(
    before: Sequence[EvaluationRow],
    after: Sequence[EvaluationRow],
    tasks_to_ask: Mapping[str, int] | None = None,
) -> KeptSkills:
    """Compare answers before and after training, battery by battery (a battery is a set of tasks).

    The batteries are those of `before`, which must not be empty. The verdict of the whole is that
    of the worst battery. `tasks_to_ask` maps the name of a battery to how many tasks it is a sample
    of.
    """
    batteries = []
    for battery in _compared_batteries(before, after):
        total = (tasks_to_ask or {}).get(battery.battery)
        if total is not None and total > battery.n:  # the battery is a sample of these tasks
            battery = replace(battery, of_tasks=total)
        batteries.append(battery)
    verdicts = {battery.verdict for battery in batteries}
    worst: Word = next(word for word in WORDS if word in verdicts)  # the worst come first
    summary = " ".join(sentence_of(battery) for battery in batteries)
    return KeptSkills(verdict=worst, batteries=batteries, summary=summary)


def _compared_batteries(
    before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]
) -> list[Battery]:
    """Compare each battery (set of tasks) of `before` with the same battery of `after`. The p
    values are corrected for the number of batteries."""
    names = list(dict.fromkeys(str(row.battery) for row in before))  # each once, in order
    rows_before = {name: _rows_of_battery(before, name) for name in names}
    rows_after = {name: _rows_of_battery(after, name) for name in names}
    outcomes = {name: _outcome_of_battery(rows_before[name], rows_after[name]) for name in names}
    p_values = _corrected_p_values(outcomes)  # only of the batteries that were tested
    return [
        _compared_battery(
            name, rows_before[name], rows_after[name], outcomes[name], p_values.get(name)
        )
        for name in names
    ]


def _outcome_of_battery(
    before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]
) -> PairedVerdict:
    """The paired test of the answers before and after training to one battery (set of tasks)."""
    measure = _battery_measure(before)
    return paired_verdict(side(before, measure), side(after, measure))


def _corrected_p_values(outcomes: Mapping[str, PairedVerdict]) -> dict[str, float]:
    """The p value of each battery (set of tasks) that was tested, by name, with Holm's correction:
    each battery is another chance to mistake bad luck for a loss."""
    p_values = {name: outcome.p for name, outcome in outcomes.items() if outcome.p is not None}
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))


def skill_sentences(skills: KeptSkills | None) -> list[str]:
    """What the verdict says of earlier skills: a sentence on each loss. If nothing was forgotten
    and rows were replayed, the summary of what was kept; else []."""
    losses = loss_sentences(skills)
    if losses or skills is None or skills.replayed is None:
        return losses
    return [skills.summary]


def loss_sentences(skills: KeptSkills | None) -> list[str]:
    """A sentence for each comparison in which skills, or a single skill, were forgotten: the
    comparison with the run's own start, and that with the base model. Returns [] if none were."""
    if skills is None:
        return []
    comparisons = (skills, skills.against_base)
    return [
        comparison.summary
        for comparison in comparisons
        if comparison is not None and _lost_something(comparison)
    ]


def _lost_something(comparison: "KeptSkills | SinceBase") -> bool:
    """Whether a battery (set of tasks) was forgotten, or a single skill of a battery was lost."""
    has_lost_skill = any(battery.lost_skill for battery in comparison.batteries)
    return comparison.verdict == "forgotten" or has_lost_skill


def _compared_with_base(run_dir: RunDir, after: Sequence[EvaluationRow]) -> SinceBase | None:
    """Compare the answers `after` training with the answers of the base model of this run.

    The base model is the one that the oldest ancestor began with. Returns None for a run without
    ancestors, and if the base model was not asked the same batteries (sets of tasks).
    """
    runs = ancestry(run_dir)[::-1]  # the oldest first, this run last
    if len(runs) == 1:
        return None
    oldest = runs[0]
    before = _answers_of_base(oldest, after)
    if not before:
        return None
    skills = compare_skills(before, after)
    base = started_from(oldest)
    lost_by = [run.id for run in runs if _forgot_something(run)]
    summary = " ".join(sentence_of(battery, f" since {base}") for battery in skills.batteries)
    if skills.verdict == "forgotten" and lost_by:
        summary += f" Lost by {', '.join(lost_by)}."
    return SinceBase(
        base=base,
        verdict=skills.verdict,
        batteries=skills.batteries,
        summary=summary,
        lost_by=lost_by,
    )


def _answers_of_base(oldest: RunDir, after: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """The base model's answers to the batteries (sets of tasks) that `after` has, from before the
    training of the `oldest` run."""
    asked_batteries = {row.battery for row in after}
    base_rows = read_evaluation(oldest.kept("before"))
    return [row for row in base_rows if row.battery in asked_batteries]


def _forgot_something(run_dir: RunDir) -> bool:
    """Whether a run's own training made the model forget something.

    Returns False if the tasks that measure its skills were not asked before and after training.
    """
    before = read_evaluation(run_dir.kept("before"))
    after = read_evaluation(run_dir.kept("after"))
    if not before or not after:
        return False
    return compare_skills(before, after).verdict == "forgotten"


def _rows_of_battery(rows: Sequence[EvaluationRow], battery: str) -> list[EvaluationRow]:
    """The rows that belong to one battery (a set of tasks)."""
    return [row for row in rows if str(row.battery) == battery]


def _battery_measure(before: Sequence[EvaluationRow]) -> Measure:
    """The measure by which a battery (set of tasks) is compared: success if every row reports
    success, else reward."""
    return "success" if all(row.success is not None for row in before) else "reward"


def _compared_battery(
    name: str,
    before: Sequence[EvaluationRow],
    after: Sequence[EvaluationRow],
    outcome: PairedVerdict,
    corrected_p: float | None,
) -> Battery:
    """The comparison of the battery (set of tasks) `name`.

    `corrected_p` is the p value of `outcome`, corrected for the other batteries; None if nothing
    was tested.
    """
    return Battery(
        battery=name,
        verdict=_skill_verdict(outcome, corrected_p),
        metric=_battery_measure(before),
        before=rounded(outcome.before),
        after=rounded(outcome.after),
        difference=rounded(outcome.diff),
        interval=rounded_ends(outcome.low, outcome.high),
        n=outcome.n,
        gained=len(outcome.gained),
        lost=len(outcome.lost),
        smallest_detectable_gap=rounded(outcome.detectable),
        reason=outcome.reason if outcome.verdict == "unknown" else "",
        skills=_skills(before, after),
        lost_of_right=_lost_of_right(before, after),
    )


def _lost_of_right(
    before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]
) -> LostOfRight | None:
    """How many of the tasks that were right before training are wrong after it. An answer that
    could not be scored after training counts as wrong.

    Returns None if no task that was asked both times was right before.
    """
    right_after = {row.task: row.success is True for row in after}
    # For each task that was right before: whether it still is.
    still_right = [
        right_after[row.task] for row in before if row.success and row.task in right_after
    ]
    if not still_right:
        return None
    return LostOfRight.from_counts(len(still_right), still_right.count(False))


def _skill_verdict(outcome: PairedVerdict, p: float | None) -> Word:
    """What the paired test of a battery (set of tasks) means for the skill that it measures.

    "forgotten" and "improved" are differences that stay significant after the correction. A loss is
    "inconclusive" if only a one-sided test would call it significant. All else is "kept". `p` is
    the p value corrected for the other batteries; None if there was no test.
    """
    if outcome.verdict == "unknown":
        return "unknown"
    is_significant = p is None or p < ALPHA  # without a test the verdict has no p to correct
    if outcome.verdict in ("worse", "better") and is_significant:
        return "forgotten" if outcome.verdict == "worse" else "improved"
    is_lower = outcome.diff is not None and outcome.diff < 0
    # A two-sided p below twice ALPHA is significant in a one-sided test.
    may_be_real = outcome.p is not None and outcome.p < _MAYBE_LOST
    # After "no_difference" the loss is too small to matter, even if it is real.
    if is_lower and may_be_real and outcome.verdict != "no_difference":
        return "inconclusive"
    return "kept"


def _skills(before: Sequence[EvaluationRow], after: Sequence[EvaluationRow]) -> list[Skill]:
    """Mean rewards before and after training by kind of task (`family`), the largest loss first.

    Tasks without a kind form one kind with the name "". Returns [] if no task names its kind.
    """
    names = list(dict.fromkeys(row.family or "" for row in before))  # each once, in order
    if names == [""]:  # all tasks are of one kind without a name
        return []
    skills: list[Skill] = []
    p_values: list[float] = []
    for name in names:
        rows_before, rows_after = _rows_of_kind(before, name), _rows_of_kind(after, name)
        means = mean_reward(rows_before), mean_reward(rows_after)
        skills.append(Skill(name, *means, _lost_of_right(rows_before, rows_after)))
        p_values.append(p_of_loss(rows_before, rows_after))
    # Holm's correction, because each kind is another chance to mistake bad luck for a loss.
    corrected = zip(skills, holm(p_values), strict=True)
    with_losses = [replace(skill, is_lost=p < ALPHA) for skill, p in corrected]
    return sorted(with_losses, key=_change_and_name)


def _rows_of_kind(rows: Sequence[EvaluationRow], name: str) -> list[EvaluationRow]:
    """The rows on tasks of the kind `name` (`family`); "" stands for tasks without a kind."""
    return [row for row in rows if (row.family or "") == name]


def _change_and_name(skill: Skill) -> tuple[float, str]:
    """The sort key that puts the largest loss first: the change of the mean reward, then the name.
    A missing mean counts as 0."""
    return (skill.after or 0.0) - (skill.before or 0.0), skill.skill


def sentence_of(battery: Battery, since: str = "") -> str:
    """The comparison of a battery (set of tasks) in one sentence, such as "Forgotten (arithmetic):
    82 % to 41 % on 40 tasks (95 % interval of the change -56.2 to -25.8 points); most of
    all sums 0.90 to 0.30."

    `since` names the model it is compared with, such as " since pebble"; "" for the run's own
    start.
    """
    if battery.verdict == "forgotten":
        change_text = f"{_levels_text(battery)} ({_change_text(battery)})"
        lost_text = f"{_lost_text(battery)}{_most_lost_skills(battery)}"
        return f"Forgotten{since} ({battery.battery}): {change_text}{lost_text}."
    return f"Kept skills{since} ({battery.battery}): {_kept_text(battery)}."


def _kept_text(battery: Battery) -> str:
    """The part of the sentence about a battery (set of tasks) in which nothing was forgotten."""
    if battery.verdict == "unknown":
        return f"unknown, {battery.reason}"
    levels = _levels_text(battery)
    lost_skill = battery.lost_skill  # one that is significantly worse by itself
    if lost_skill is not None and lost_skill.lost_of_right is not None:
        name, lost = lost_skill.skill or "the rest", lost_skill.lost_of_right.text
        words = {"improved": "better", "kept": "no clear loss"}
        word_of_all = words.get(battery.verdict, "inconclusive")
        of_all = f"{word_of_all}, {levels} ({_change_text(battery)})"
        return f"{name} was lost: {lost}; all skills together: {of_all}"
    if battery.verdict == "improved":
        return f"better, {levels} ({_change_text(battery)}){_lost_text(battery)}"
    if battery.before == 0.0 and not battery.gained:
        return f"nothing to lose, 0 before on {battery.n} tasks"
    if battery.verdict == "inconclusive":
        flips = f"{battery.lost} lost, {battery.gained} gained"
        return f"inconclusive, {levels} ({_change_text(battery)}), {flips}"
    gap = f"a loss of {_gap_text(battery)} would have shown"
    return f"no clear loss, {levels} ({_change_text(battery)}; {gap}){_lost_text(battery)}"


def _levels_text(battery: Battery) -> str:
    """The means before and after training, such as "82 % to 41 % on 40 tasks"; for a sample of more
    tasks "... on 40 of 1,200 tasks"."""
    before, after = (
        show(mean, battery.metric, digits=0) for mean in (battery.before, battery.after)
    )
    sample = f" of {battery.of_tasks:,}" if battery.of_tasks else ""
    return f"{before} to {after} on {battery.n}{sample} tasks"


def _change_text(battery: Battery) -> str:
    """The interval of the change, such as "95 % interval of the change -4.8 to +0.5 points"."""
    low, high = (show_change(end, battery.metric) for end in battery.interval)
    unit = " points" if battery.metric == "success" else ""
    return f"95 % interval of the change {low} to {high}{unit}"


def _lost_text(battery: Battery) -> str:
    """The sentence part that follows the means: ", 4 of 44 right ones lost (4 to 21 %)" and the
    kind of task that lost most. Returns "" if no task that was right is lost."""
    lost = battery.lost_of_right
    if lost is None or not lost.lost:
        return ""
    return f", {lost.text}{_worst_group(battery)}"


def _worst_group(battery: Battery) -> str:
    """The sentence part on the kind of task that lost most: ", most in sums: 3 of 9 right ones lost
    (...)". Returns "" if the tasks are of one kind, or if no kind of some size lost any."""
    losses = {skill.skill: skill.lost_of_right for skill in battery.skills if skill.lost_of_right}
    worst = worst_kind(losses)
    return "" if worst is None else f", most in {worst or 'the rest'}: {losses[worst].text}"


def _gap_text(battery: Battery) -> str:
    """The smallest change that would have shown: "9 points" for success, "0.05" for a reward."""
    gap_points = 100 * (battery.smallest_detectable_gap or 0.0)
    if battery.metric == "success":
        return f"{gap_points:.0f} points"
    return f"{gap_points / 100:.2g}"  # back in the reward's own unit


def _most_lost_skills(battery: Battery) -> str:
    """The sentence part on the skills that lost most, such as "; most of all sums 0.90 to 0.30".
    Returns "" if none lost. A mean without scores counts as 0."""
    lost_skills = [skill for skill in battery.skills if skill.lost][:_NAMED]
    if not lost_skills:
        return ""
    changes = [
        f"{skill.skill} {skill.before or 0.0:.2f} to {skill.after or 0.0:.2f}"
        for skill in lost_skills
    ]
    return f"; most of all {', '.join(changes)}"


def keep_settings(settings: KnownSettings, batteries: Sequence[Battery]) -> dict[str, object]:
    """The settings that replay more of what was lost in `batteries` (sets of tasks): the next
    larger share `keep` of replayed rows. Returns {} if the run with these `settings` has the
    largest share already.

    If the lost batteries are all environments, `keep_env` names the first: its rows are replayed.
    """
    used_share = settings.keep or 0.0
    larger_shares = [share for share in _SHARES if share > used_share]  # in ascending order
    if not larger_shares:
        return {}
    new_settings: dict[str, object] = {"keep": larger_shares[0]}
    lost_names = [battery.battery for battery in batteries if battery.verdict == "forgotten"]
    # The name of a battery is an environment's id such as "sums@3f2a", or that of a set of skills.
    if lost_names and all("@" in name for name in lost_names):
        new_settings["keep_env"] = lost_names[0]
    return new_settings


def calls_with_larger_keep(config: RunConfig | None, skills: KeptSkills | None) -> list[Call]:
    """The call that submits a run again with the next larger `keep` (share of replayed rows), as a
    list of one. Returns [] unless the run was SFT or GRPO, forgot skills itself, and can replay
    more."""
    if not isinstance(config, SFTConfig | GRPOConfig):
        return []
    if skills is None or skills.verdict != "forgotten":
        return []
    larger_keep = keep_settings(KnownSettings.of(config.settings), skills.batteries)
    if not larger_keep:
        return []
    values, sources = config.settings.model_dump(), config.sources
    chosen_by_user = {name: values[name] for name in sources if sources[name] == "user"}
    arguments = {"env_id": config.env_id, "model": config.model, "algorithm": config.algorithm}
    return [Call("submit_train", {**arguments, "settings": {**chosen_by_user, **larger_keep}})]
