"""The checks of a dry run: the list of their results, and the judgement of training data and of a
probe (sampled answers of the start model)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from engine.core.errors import UserError
from engine.core.format import counted, percent, whole_percent
from engine.core.hints import Call, Change, Hint, hint_of
from engine.core.reply import Reply
from engine.core.wording.shared import shared_texts
from engine.cost.estimate import none_fit
from engine.environments.env_facts import TOO_MANY_CUT, EnvFacts
from engine.environments.registry import EnvRecord, read_tasks
from engine.evidence.stats.inference import wilson
from engine.evidence.stats.learnability import BROKEN
from engine.records.run_result import ProbeResult
from engine.records.settings import (
    HARMLESS_STEPS,
    USUAL_KEEP,
    DPOSettings,
    GRPOSettings,
    RolloutSettings,
    RowSettings,
    SFTSettings,
    TrainSettings,
)
from envs.audit.audit_summary import best_degenerate
from envs.json_types import TaskRow

# With fewer held-out rows than this a verdict can show only large gains.
FEW_HELDOUT = 100
# Above these shares data or a probe gets a warning: answers cut, prompts repeated, samples cut.
_MANY_TRUNCATED = 0.02
_MANY_DUPLICATES = 0.2
_MANY_CUT_SAMPLES = 0.1
# If a smaller share of the groups than this have differing rewards, GRPO has next to nothing to
# learn from.
_FEW_EFFECTIVE = 0.2
# The keys of a version's reward audit that a report shows.
_AUDIT_KEYS = (
    "verdict",
    "headline",
    "share",
    "deterministic",
    "order_dependent",
    "fresh_process",
    "separability",
    "saturation",
    "score_seconds_p95",
    "problems",
    "gold_failing",
)
# The share of rows in other words to begin with; measured in benchmarks/RESULTS.md.
_USUAL_VARY = 0.5
# Answers have a narrow form if, of the first 400 (at least 20), a share of 0.9 begins or ends with
# the same mark, or at most a share of 0.1 is different.
_FORM_ROWS, _FEWEST_FORM, _SAME_FORM, _FEW_ANSWERS = 400, 20, 0.9, 0.1
Status = Literal["pass", "warn", "fail", "skip"]
Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        status: "skip" if the check could not be made.
        detail: what was seen, with numbers.
        fix: what to do about it; "" if nothing is to be done.
        code: the code of the error that a submit would raise for it; "" if it would raise none.
    """

    status: Status
    detail: str
    fix: str | Hint = ""
    code: str = ""


@dataclass(frozen=True)
class Check:
    """A check as the report shows it. Its `fix` holds the whole call to make, if there is one."""

    name: str
    status: Status
    detail: str
    fix: Hint
    code: str

    def to_json(self) -> dict[str, object]:
        """Return the check as a JSON object: name, status, detail and fix; also the call of the fix
        and the code, if there are any."""
        fields: dict[str, object] = {
            "name": self.name,
            "status": self.status,
            "detail": self.detail,
        }
        fields |= self.fix.as_fields("fix")
        if self.code:
            fields["code"] = self.code
        return fields


# Name of a check -> the section of the playbook (the guide) that helps if the check fails.
_SECTIONS = {
    "env": "environments",
    "data": "sft",
    "contamination": "evidence",
    "reward_audit": "rewards",
    "probe": "curriculum",
}


class CheckList:
    """The checks of a dry run, in the order in which they are made.

    Attributes:
        dry_run_call: returns the call of this dry run; a fix may change its arguments.
        checks: the checks made so far.
    """

    def __init__(self, dry_run_call: Callable[[], Call]) -> None:
        """Start an empty list; `dry_run_call` returns the call of this dry run."""
        self.dry_run_call = dry_run_call
        self.checks: list[Check] = []

    def run_check(self, name: str, needs: Sequence[str], check: Callable[[], Outcome]) -> None:
        """Make a check and add its result to the list.

        Args:
            name: the name of the check, as the report shows it.
            needs: names of earlier checks. If one of them failed or was skipped, this check is
                skipped; a warning counts as passed.
            check: makes the check. If it raises a UserError, the check has failed.
        """
        # The status of a check that was never made is "skip" too.
        not_passed = [need for need in needs if self.status(need) not in ("pass", "warn")]
        if not_passed:
            outcome = Outcome("skip", f"needs {not_passed[0]}")
        else:
            try:
                outcome = check()
            except UserError as error:
                outcome = Outcome("fail", error.message, error.advice, error.code)
        # Turn a fix that only says which arguments to change into the whole changed call.
        fix = hint_of(outcome.fix).for_call(self.dry_run_call())
        self.checks.append(Check(name, outcome.status, outcome.detail, fix, outcome.code))

    def status(self, name: str) -> str:
        """Return the status of the check `name`; "skip" if no check of that name was made."""
        return next((check.status for check in self.checks if check.name == name), "skip")

    def has(self, name: str) -> bool:
        """Return whether the list has a check of this name, made or skipped."""
        return any(check.name == name for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.status == "fail"]

    @property
    def remedies(self) -> list[Call]:
        """The calls that fix failed checks. Then, if the playbook has a section about some failed
        check, the call that reads the section about the first of these checks."""
        calls = [check.fix.call for check in self.failed if check.fix.call]
        sections = [_SECTIONS[check.name] for check in self.failed if check.name in _SECTIONS]
        if sections:
            calls.append(Call("read_playbook", {"section": sections[0]}))
        return calls


def required(fact: Fact | None) -> Fact:
    """Return `fact`, which an earlier check of the dry run has stored; this only tells the type
    checker that it is not None.

    It cannot be None: the calling check names the earlier check among its needs, and is skipped if
    that one fails.
    """
    assert fact is not None
    return fact


def judge_data(
    statistics: Reply, rows: EnvFacts, settings: TrainSettings, record: EnvRecord
) -> Outcome:
    """Judge whether the training rows fit the settings.

    The outcome is a failure if a run could not use the rows. It is a warning if some are cut,
    repeated or left out, if few rows are held out, or if SFT on them would cost other skills.

    Args:
        statistics: token counts of the training rows under these settings, as
            engine.environments.env_facts.statistics returns them.
        rows: facts of all rows of the environment.
        settings: the resolved settings of the run.
        record: the environment.
    """
    return _with_forgetting_note(_judge_rows(statistics, rows, settings), record, settings)


def _judge_rows(statistics: Reply, rows: EnvFacts, settings: TrainSettings) -> Outcome:
    """Judge whether the training rows fit the settings, by their lengths and numbers.

    The outcome is a failure if a run could not use the rows, and a warning if they have weaknesses.
    `statistics` count the training rows under these settings; `rows` are facts of all rows.
    """
    failure = _data_failure(statistics, rows, settings)
    if failure is not None:
        return failure
    detail = _data_in_words(statistics, settings)
    weaknesses = _data_weaknesses(statistics, rows, settings)
    if not weaknesses:
        return Outcome("pass", detail)
    texts = "; ".join(weakness.text for weakness in weaknesses)
    remedies = " ".join(weakness.remedy for weakness in weaknesses if weakness.remedy)
    return Outcome("warn", f"{detail}; {texts}", remedies)


def _data_in_words(statistics: Reply, settings: TrainSettings) -> str:
    """Say how many training rows there are and how long their prompts and answers are, in tokens.

    `statistics` count these rows under the settings.
    """
    prompt, target = statistics["prompt"], statistics["target"]  # percentiles of token counts
    text = (
        f"{statistics['rows']} train rows, "
        f"prompts of {prompt['p50']} tokens (95 %: {prompt['p95']}), "
        f"answers of {target['p50']} (95 %: {target['p95']})"
    )
    if statistics["split"] and isinstance(settings, SFTSettings):
        text += (
            f"; the chat template writes earlier turns differently, so {statistics['split']} "
            "conversations are trained as several rows, each turn after the prompt it has in use"
        )
    return text


def _data_failure(statistics: Reply, rows: EnvFacts, settings: TrainSettings) -> Outcome | None:
    """Return the failure if the chat template refuses rows, no row can be trained on, or the model
    could not write the reference answers; else None.

    `statistics` are of the training rows under these settings, `rows` are facts of all rows.
    """
    if rows.refused:
        return Outcome(
            "fail",
            f"the model's chat template cannot write {rows.refused} rows; {rows.refusal}",
            "Train a model whose template takes such messages, or leave out of the rows what this "
            "one names.",
            "DATASET_INVALID",
        )
    if rows.without_reasoning and not statistics["counted"]:
        return Outcome(
            "fail",
            "thinking = require leaves out every row: none has reasoning in all its turns",
            "Put reasoning_content into the assistant's messages, or set thinking = keep.",
            "DATASET_INVALID",
        )
    misfit = none_fit(statistics, settings)
    if misfit:
        return Outcome("fail", misfit, "Raise max_length.", "DATASET_INVALID")
    if isinstance(settings, RolloutSettings) and rows.cut_share(settings.max_tokens) > TOO_MANY_CUT:
        return _cut_references_failure(rows, settings)
    return None


def _cut_references_failure(rows: EnvFacts, settings: RolloutSettings) -> Outcome:
    """Return the failure of the check of the data because max_tokens, the limit on a sampled
    answer, is shorter than many reference answers.

    The fix is a max_tokens into which all of them fit and, if necessary, a max_length into which
    the longest prompt fits as well. `rows` are facts of all rows of the environment.
    """
    needed_tokens = rows.longest_turn
    advice = f"Set max_tokens = {needed_tokens}, which all of them fit into"
    changed: dict[str, object] = {"max_tokens": needed_tokens}
    needed_length = rows.longest_prompt + needed_tokens
    if needed_length > settings.max_length:
        advice += f", and max_length = {needed_length}"
        changed["max_length"] = needed_length
    cut_share = whole_percent(rows.cut_share(settings.max_tokens))
    detail = (
        f"{cut_share} of the reference answers do not fit into max_tokens = "
        f"{settings.max_tokens}: no sample could be that answer"
    )
    return Outcome("fail", detail, Hint(f"{advice}.", change=Change(settings=changed)))


@dataclass(frozen=True)
class _Weakness:
    """A weakness of rows that can be used, in words, and its remedy; "" for none."""

    text: str
    remedy: str = ""


def _data_weaknesses(statistics: Reply, rows: EnvFacts, settings: TrainSettings) -> list[_Weakness]:
    """Return the weaknesses of training rows that can be used, one for each kind that applies.

    `statistics` count the training rows under these settings; `rows` are facts of all rows of the
    environment.
    """
    weaknesses = (
        _dropped_rows(statistics),
        _rows_without_reasoning(rows),
        _cut_answers(statistics, settings),
        _rows_without_answer(statistics, settings),
        _repeated_prompts(statistics),
        _few_heldout_rows(rows, settings),
    )
    return [weakness for weakness in weaknesses if weakness is not None]


def _dropped_rows(statistics: Reply) -> _Weakness | None:
    """Return the weakness that max_length leaves out rows; None if it leaves out none."""
    count = statistics["dropped"]
    if not count:
        return None
    return _Weakness(f"{count} rows do not fit and are left out", "Raise max_length.")


def _rows_without_reasoning(rows: EnvFacts) -> _Weakness | None:
    """Return the weakness that thinking = require leaves out rows; None if it leaves out none."""
    count = rows.without_reasoning
    if not count:
        return None
    text = f"{count} rows have a turn without reasoning and are left out"
    return _Weakness(text, "Set thinking = keep to train them too.")


def _cut_answers(statistics: Reply, settings: TrainSettings) -> _Weakness | None:
    """Return the weakness that a limit on lengths cuts many answers; None if it cuts few."""
    share = statistics["truncated_share"]
    if share <= _MANY_TRUNCATED:
        return None
    if isinstance(settings, RowSettings):
        limit_name, limit = "max_length", settings.max_length
    else:
        limit_name, limit = "max_tokens", settings.max_tokens
    text = f"{whole_percent(share)} of the answers are cut at {limit_name} = {limit}"
    return _Weakness(text, f"Raise {limit_name}.")


def _rows_without_answer(statistics: Reply, settings: TrainSettings) -> _Weakness | None:
    """Return the weakness that rows without a reference answer are left out; None if there are no
    such rows, or if the run does not train on reference answers."""
    count = statistics["without_answer"]
    if not count or not isinstance(settings, RowSettings):
        return None
    lacking = "pair" if isinstance(settings, DPOSettings) else "answer"
    return _Weakness(f"{count} rows have no {lacking} and are left out")


def _repeated_prompts(statistics: Reply) -> _Weakness | None:
    """Return the weakness that many rows have the prompt of an earlier row; None if few have."""
    share = statistics["duplicate_share"]
    if share <= _MANY_DUPLICATES:
        return None
    return _Weakness(f"{whole_percent(share)} of the prompts repeat an earlier one")


def _few_heldout_rows(rows: EnvFacts, settings: TrainSettings) -> _Weakness | None:
    """Return the weakness that a verdict would rest on few held-out rows; None if there are
    enough."""
    count = rows.measured_rows(by_pairs=isinstance(settings, DPOSettings))
    if count >= FEW_HELDOUT:
        return None
    return _Weakness(
        f"{count} held-out rows can show only large gains",
        f"Give the environment at least {FEW_HELDOUT} held-out rows, better 400.",
    )


def _with_forgetting_note(outcome: Outcome, record: EnvRecord, settings: TrainSettings) -> Outcome:
    """Return the outcome of `_judge_rows`; for SFT, with a note on the skills that training may
    cost, and with the setting `keep` (rows of earlier skills trained again) that keeps them.

    The outcome becomes a warning if all answers have one narrow form: training on such rows alone
    loses most. If the run replays rows already, the outcome says so. A failure, and the outcome of
    a run too short to lose much, are returned unchanged.
    """
    if not isinstance(settings, SFTSettings) or outcome.status == "fail":
        return outcome
    if settings.keep:
        return replace(outcome, detail=f"{outcome.detail}; {_replay_text(settings)}")
    if settings.steps <= HARMLESS_STEPS:
        return outcome
    form = narrow_form(read_tasks(record, "train"))
    forgetting_note = (
        "what the model can do now is asked before and after, and rows of one task alone tend to "
        "lose it"
    )
    about_form = f"{form}: " if form else ""
    detail = f"{outcome.detail}; {about_form}{forgetting_note}"
    earlier_fix = hint_of(outcome.fix)
    change = earlier_fix.change or Change()
    fix = Hint(
        f"{earlier_fix.text} keep = {USUAL_KEEP:g} replays what it could do in each batch.".strip(),
        change=replace(change, settings={**change.settings, "keep": USUAL_KEEP}),
    )
    return Outcome("warn" if form else outcome.status, detail, fix, outcome.code)


def _replay_text(settings: SFTSettings) -> str:
    """Say which rows a run replays and why, as a clause of a sentence."""
    rows = f"rows of {settings.keep_env}" if settings.keep_env else "its own right answers"
    return (
        f"keep = {settings.keep:g} replays {rows} beside the task's, for "
        f"{counted(settings.steps, 'step')} on the task alone would overwrite what the model can do"
    )


def narrow_form(tasks: Sequence[TaskRow]) -> str:
    """Say what the answers of training rows have in common, as a clause: a mark (punctuation) with
    which nearly all begin or end, or that there are few different answers.

    Only the first `_FORM_ROWS` rows are read. Returns "" if the answers have nothing in common, or
    if fewer than `_FEWEST_FORM` rows have an answer.
    """
    texts = _first_answers(tasks)
    if len(texts) < _FEWEST_FORM:
        return ""
    first_characters = Counter(text[:1] for text in texts)
    last_characters = Counter(text[-1:] for text in texts)
    for verb, character_counts in (("begin", first_characters), ("end", last_characters)):
        ((character, count),) = character_counts.most_common(1)
        # Letters, digits and the end of a sentence are no narrow form: any text has them.
        is_mark = not character.isalnum() and character not in ("", ".", "!", "?")
        if is_mark and count >= _SAME_FORM * len(texts):
            return f"nearly all answers {verb} with {character!r}"
    distinct_count = len(set(texts))
    if distinct_count <= len(texts) * _FEW_ANSWERS:
        return f"{len(texts)} answers are only {distinct_count} different ones"
    return ""


def _first_answers(tasks: Sequence[TaskRow]) -> list[str]:
    """Return the text of the last answer in each of the first `_FORM_ROWS` rows; rows without one
    are skipped."""
    texts = []
    for index in range(min(len(tasks), _FORM_ROWS)):
        conversation = tasks[index].get("gold") or []
        if conversation and conversation[-1].get("role") == "assistant":
            texts.append(str(conversation[-1].get("content") or "").strip())
    return texts


def cannot_start(result: ProbeResult) -> str:
    """Say why GRPO cannot start from here: no sampled answer was right, and in no group (the
    answers to one task) do rewards differ. Returns "" if that is not so, or not known."""
    answers = result.tasks * result.samples_per_task
    if not answers or result.effective > 0 or not result.solved_counts or any(result.solved_counts):
        return ""
    highest_rate = wilson(0, answers).high  # of right answers, with a certainty of 95 %
    return (
        f"out of reach for GRPO: none of {answers} answers is right (with 95 % certainty fewer "
        f"than {percent(highest_rate, unit='%')} are, one in {1 / highest_rate:.0f}), and all of a "
        "task earn the same"
    )


def judge_wording(record: EnvRecord, settings: TrainSettings) -> Outcome:
    """Judge whether all training rows share a tool text or a system message, on whose very words a
    model may come to depend.

    The outcome is a warning if they do and nothing (`vary_wording`) varies the words.
    """
    shared = shared_texts(read_tasks(record, "train"), record.tools)
    if not shared.kinds:
        return Outcome("pass", "the rows share neither tool texts nor a system message")
    if not isinstance(settings, SFTSettings | GRPOSettings):
        fix = Hint("Vary the text in the rows: tools of a task's own, several system messages.")
    elif settings.vary_wording:
        return Outcome("pass", f"{shared.sentence}; vary_wording = {settings.vary_wording:g}")
    else:
        fix = Hint(
            f"vary_wording = {_USUAL_VARY:g} asks that share of the rows in other words; or give "
            "the tasks tools and system messages of their own. evaluate with perturb tells after "
            "the run.",
            change=Change(settings={"vary_wording": _USUAL_VARY}),
        )
    return Outcome("warn", f"{shared.sentence}: a change of it may break the model", fix)


def too_hard(result: ProbeResult) -> bool:
    """Return whether a probe shows that GRPO would learn next to nothing, because hardly any answer
    is right.

    That is so if too few groups (the answers to one task) have differing rewards, and groups that
    are all wrong are at least as many as groups that are all right.
    """
    if result.effective >= _FEW_EFFECTIVE:
        return False
    hard_share, easy_share = result.too_hard, result.too_easy
    return hard_share >= easy_share and hard_share > 0


def warn_of_degenerate(outcome: Outcome, result: ProbeResult, audit: Reply) -> Outcome:
    """Turn the outcome of a probe into a warning if a degenerate answer (empty, repeated, ...)
    earns more than the model does on average: GRPO would learn that answer first.

    An outcome that is a failure, or that needs no such warning, is returned unchanged.

    Args:
        outcome: what `judge_probe` returned.
        result: what the probe measured of the model.
        audit: the environment's reward audit; {} if there is none.
    """
    best = best_degenerate(audit.get("probes") or [])  # "probes": wrong answers that it tried
    model_mean = result.reward_mean
    if best is None or model_mean is None or outcome.status == "fail":
        return outcome
    if best["mean"] <= max(0.0, model_mean):  # an answer that earns nothing is not learnt
        return outcome
    answer_name = best["probe"]
    text = (
        f"{answer_name} pays {best['mean']:.2f}, the model earns {model_mean:.2f} on average: "
        f"{answer_name} is the best it can reach"
    )
    fix = f"Pay less for {answer_name} than for a first try, and push again, or train by SFT first."
    fixes = f"{fix} {outcome.fix}".strip()
    return Outcome("warn", f"{text}; {outcome.detail}", fixes, outcome.code)


def judge_probe(result: ProbeResult) -> Outcome:
    """Judge a finished probe (sampled answers of the start model).

    The outcome has the probe's numbers in words and the change that they suggest. It is a failure
    if so many scores failed that the other numbers mean nothing.
    """
    detail = _probe_in_words(result)
    groups_outcome = _judge_groups(result, detail)
    if not result.error_share:
        return groups_outcome
    detail = f"{whole_percent(result.error_share)} of the scores failed; {detail}"
    fix = "Mend score() and push again."
    if result.error_share > BROKEN:
        return Outcome("fail", detail, fix, "ENV_INVALID")
    # With some failed scores it is always a warning: advice on these first, then on the groups.
    return Outcome("warn", detail, f"{fix} {groups_outcome.fix}".strip())


def _probe_in_words(result: ProbeResult) -> str:
    """Write the numbers of a probe in words: how many groups (the answers to one task) have
    differing rewards, because only these teach anything, and how many of the others are too hard or
    too easy."""
    passes = ", ".join(f"pass@{k} {value:.2f}" for k, value in result.pass_at_k.items())
    text = (
        f"{whole_percent(result.effective)} of {result.tasks} groups have variance "
        f"({whole_percent(result.too_hard)} too hard, {whole_percent(result.too_easy)} too "
        f"easy), {passes}, "
        f"{whole_percent(result.truncated_share)} truncated"
    )
    if result.gradient_share:
        share_by_size = result.gradient_share.items()
        listed = ", ".join(f"{size}: {whole_percent(share)}" for size, share in share_by_size)
        text += f"; groups that would teach, by group_size: {listed}"
    return text


def _judge_groups(result: ProbeResult, detail: str) -> Outcome:
    """Judge whether GRPO could learn from the sampled groups (the answers to one task each).

    `detail` becomes the detail of the outcome.
    """
    if result.truncated_share > _MANY_CUT_SAMPLES:
        fix = "Raise max_tokens, or ask for shorter answers."
        if too_hard(result):
            fix += " If the groups stay too hard: train by SFT first."
        return Outcome("warn", detail, fix)
    if too_hard(result):
        reason = cannot_start(result)
        return Outcome(
            "warn",
            f"{reason}; {detail}" if reason else detail,
            "GRPO has little to select: train by SFT first, take easier tasks, give partial "
            "credit or raise group_size.",
        )
    # Few groups teach, but not because they are too hard. If some are too easy, that is the reason.
    if result.effective < _FEW_EFFECTIVE and result.too_easy > 0:
        return Outcome("warn", detail, "The tasks are solved already: take harder ones.")
    advice = "; ".join(item.say for item in result.advice)
    if advice:
        advice = f"{advice[:1].upper()}{advice[1:]}."  # from clauses to one sentence
    return Outcome("pass", detail, advice)


def short_audit(audit: Reply) -> Reply:
    """Return the part of a stored reward audit that a report shows: the keys in `_AUDIT_KEYS`, and
    the most important keys of each probe (a wrong answer that was tried on the scorer)."""
    short = {key: audit[key] for key in _AUDIT_KEYS if key in audit}
    if "probes" in audit:
        probe_keys = ("probe", "mean", "success", "errors", "verdict", "example")
        short["probes"] = [
            {key: probe[key] for key in probe_keys if key in probe} for probe in audit["probes"]
        ]
    return short
