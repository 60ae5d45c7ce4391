"""Decides which of a model's attempts at tasks become training rows.

Attempts are grouped by environment version, task and model. A rule such as `0 < avg < 1 and n >= 4`
keeps or drops a whole group; `select` then takes attempts out of the group. The result does not
depend on the order of the sources. All functions are pure: they read no files.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from engine.core.errors import UserError
from engine.core.filters import Where
from engine.evidence.stats.basics.distributions import pass_at_k
from envs.json_types import ChatMessage

PAIRS = "pairs"
SELECTS = ("correct", "best", "best_n", "shortest", "all", PAIRS)
FIXED_COUNT = ("best", "all")  # selections that ignore max_per_task
EXAMPLE = "0 < avg < 1 and n_correct >= 2"
# Matches a text in quotes (group 1), so that an @ within it is left alone; or `name@k`, such as
# pass@4 (groups 2 and 3).
_PASS_AT_K = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|([^\W\d]\w*)?\s*@\s*(\w*)""")
_MOST_K = 1024  # largest k of pass@k, far more attempts than anybody makes at a task


@dataclass(frozen=True)
class Attempt:
    """One attempt at a task (a rollout, or an answer of an evaluation), with its origin.

    Attributes:
        source: id of the run.
        env_id: the environment version that scored the attempt.
        task: id of the task.
        model: reference of the model; for a rollout the id of the training run.
        step: training step; 0 in an evaluation.
        member: number of the attempt among those at the same task in the same source and step.
        prompt, messages: what was asked, and the following turns of model and environment.
        tokens: how many tokens the model wrote.
        error: why there is no score; None if there is one.
    """

    source: str
    env_id: str
    task: str
    model: str
    step: int
    member: int
    prompt: Sequence[ChatMessage]
    messages: Sequence[ChatMessage]
    reward: float
    success: bool | None
    tokens: int
    stop_reason: str
    error: str | None
    metrics: Mapping[str, float]

    @property
    def env_hash(self) -> str:
        """The content hash of the environment version: what follows the @ of its id."""
        _, _, env_hash = self.env_id.partition("@")
        return env_hash

    @property
    def correct(self) -> bool:
        """Whether the answer is right.

        The environment's own verdict decides; if it gives none, the answer is right if its reward
        is above 0. An attempt that could not be scored is never correct.
        """
        if self.error is not None:
            return False
        if self.success is not None:
            return self.success
        return self.reward > 0

    @property
    def sort_key(self) -> tuple[str, int, int, str, str]:
        """A key that sorts attempts in a way that does not depend on the order of the sources. The
        answer's text is its last part, for attempts that are equal in everything else."""
        text = "\n".join(str(message.get("content", "")) for message in self.messages)
        return (self.source, self.step, self.member, self.model, text)


Key = tuple[str, str, str]  # key of a group: (environment hash, task, model)


@dataclass(frozen=True)
class TaskFacts:
    """The values about one task's attempts that a rule can refer to.

    Attributes:
        avg, best, worst: mean, largest and smallest reward of the scored attempts; None if no
            attempt was scored.
        solved: whether any attempt is correct.
        n, n_correct, n_error: numbers of all attempts, of correct ones, of those without a score.
        length: mean number of tokens of the scored attempts; None if there are none.
        metrics: name -> mean of the metric over the scored attempts that have it.
    """

    avg: float | None
    best: float | None
    worst: float | None
    solved: bool
    n: int
    n_correct: int
    n_error: int
    length: float | None
    task: str
    model: str
    metrics: dict[str, float | None]


NAMES = tuple(field.name for field in fields(TaskFacts))


def groups_of(attempts: Iterable[Attempt], pool_models: bool) -> dict[Key, list[Attempt]]:
    """Group attempts by (environment hash, task, model).

    Groups are sorted by that key, and the attempts of a group by `sort_key`. With `pool_models` the
    attempts of all models at a task are one group, whose model is "".
    """
    groups: dict[Key, list[Attempt]] = {}
    for attempt in attempts:
        model = "" if pool_models else attempt.model
        groups.setdefault((attempt.env_hash, attempt.task, model), []).append(attempt)

    def sort_key_of(attempt: Attempt) -> tuple[str, int, int, str, str]:
        """Return the attempt's sort key, which does not depend on the order of the sources."""
        return attempt.sort_key

    return {key: sorted(groups[key], key=sort_key_of) for key in sorted(groups)}


class Rule:
    """The argument `where` of curate: a condition on one task's attempts, such as "pass@4 > 0.5 and
    n >= 8".

    The expression may use
    - the names of `TaskFacts`;
    - metrics of the environment, by name or as metrics["name"];
    - pass@k, the unbiased chance that one of k attempts is correct.
    """

    def __init__(self, expression: str, metrics: Iterable[str] = ()) -> None:
        """Parse the expression, such as "pass@4 > 0.5 and n >= 8". `metrics` are the names of the
        environment's own metrics, which it may use beside the names of `TaskFacts` and pass@k.
        Raises UserError BAD_ARGUMENT if the text is not such an expression."""
        self.expression = expression
        self.k_by_variable: dict[str, int] = {}  # e.g. {"pass_at_4": 4}
        # `pass@4` is no Python expression. `_variable_for_pass_at_k` replaces it by a variable, and
        # adds that to `k_by_variable`.
        python_expression = _PASS_AT_K.sub(self._variable_for_pass_at_k, expression)
        # A metric whose name is no identifier, or is that of a fact, can only be written as
        # metrics["its name"].
        metric_names = [name for name in metrics if name.isidentifier() and name not in NAMES]
        self._where = Where(
            python_expression,
            [*NAMES, *metric_names, *self.k_by_variable],
            shown=expression,
            example=EXAMPLE,
        )

    def matches(self, group: Sequence[Attempt]) -> bool:
        """Tell whether the attempts at one task (`group`) match the rule.

        Returns False if the rule compares a value that is None. Raises UserError BAD_ARGUMENT if
        the expression divides by zero, if its value is neither true nor false, or if it asks for
        pass@k and there are fewer than k scored attempts.
        """
        facts = facts_of(group)
        # A fact replaces a metric of the same name.
        values: dict[str, object] = {**facts.metrics, **vars(facts)}
        scored_count = facts.n - facts.n_error
        for name, k in self.k_by_variable.items():
            if k > scored_count:
                raise self._error(
                    f"asks for pass@{k}, but task {group[0].task!r} has {scored_count} scored "
                    "attempts",
                    f"Evaluate with attempts = {k}, or ask for pass@{max(scored_count, 1)}.",
                )
            values[name] = pass_at_k(scored_count, facts.n_correct, k)
        return self._where.matches(values, group[0].task)

    def _variable_for_pass_at_k(self, match: re.Match[str]) -> str:
        """Return the text that replaces a match of `_PASS_AT_K` in the expression.

        A text in quotes is returned unchanged. `pass@4` becomes the variable `pass_at_4`, which is
        added to `k_by_variable`. Raises UserError BAD_ARGUMENT if another name than pass stands
        before the @, or if k is not a whole number from 1 to `_MOST_K`.
        """
        quoted_text, name, k = match.groups()
        if quoted_text is not None:  # an @ in quotes is part of a text, not pass@k
            return quoted_text
        if name != "pass":
            raise self._error(
                f"uses {name or ''}@{k}; only pass takes @k",
                "pass@4 is the chance that one of 4 attempts is correct; avg, best and worst are "
                "over all attempts.",
            )
        # isdigit alone also accepts digits that int() refuses, such as "²".
        is_number = k.isascii() and k.isdigit()
        if not is_number or not 1 <= int(k) <= _MOST_K:
            raise self._error(
                f"uses pass@{k}", f"Write pass@ with a whole number from 1 to {_MOST_K}, as pass@4."
            )
        variable = f"pass_at_{int(k)}"
        self.k_by_variable[variable] = int(k)
        return f" {variable} "  # the spaces keep the variable apart from a word beside it

    def _error(self, fault: str, hint: str) -> UserError:
        """Make the error for this rule. `fault` follows the text of the rule in the message, e.g.
        "uses avg@4; only pass takes @k"."""
        return UserError(
            "BAD_ARGUMENT", f"where {self.expression[:200]!r} {fault}", hint=hint, field="where"
        )


def facts_of(group: Sequence[Attempt]) -> TaskFacts:
    """Compute the facts about the attempts at one task; `group` must hold at least one attempt."""
    scored_attempts = [attempt for attempt in group if attempt.error is None]
    rewards = [attempt.reward for attempt in scored_attempts]
    return TaskFacts(
        avg=_mean(rewards),
        best=max(rewards, default=None),
        worst=min(rewards, default=None),
        solved=any(attempt.correct for attempt in group),
        n=len(group),
        n_correct=sum(attempt.correct for attempt in group),
        n_error=len(group) - len(scored_attempts),
        length=_mean([float(attempt.tokens) for attempt in scored_attempts]),
        task=group[0].task,
        model=group[0].model,
        metrics=_mean_metrics(scored_attempts),
    )


def _mean_metrics(attempts: Sequence[Attempt]) -> dict[str, float | None]:
    """Return name -> mean of each metric, over the attempts that have it, in alphabetical order."""
    names = sorted({name for attempt in attempts for name in attempt.metrics})
    return {
        name: _mean([attempt.metrics[name] for attempt in attempts if name in attempt.metrics])
        for name in names
    }


def check_selection(select: str, max_per_task: int) -> None:
    """Check the arguments `select` and `max_per_task` of curate.

    Raises UserError BAD_ARGUMENT
    - if `select` is not one of SELECTS;
    - if `max_per_task` is not an integer of at least 1;
    - if `max_per_task` is not 1 although `select` ignores it (FIXED_COUNT).
    """
    if select not in SELECTS:
        raise UserError(
            "BAD_ARGUMENT",
            f"select={select!r} does not exist",
            hint=f"Use one of {', '.join(SELECTS)}.",
            field="select",
        )
    # In Python True is an int, but it is no count.
    is_count = isinstance(max_per_task, int) and not isinstance(max_per_task, bool)
    if not is_count or max_per_task < 1:
        raise UserError(
            "BAD_ARGUMENT",
            f"max_per_task={max_per_task!r} cannot be used",
            hint="Give a number of answers per task from 1.",
            field="max_per_task",
        )
    if select in FIXED_COUNT and max_per_task != 1:  # 1 is the default, so it was not given
        keeps = "the one best answer" if select == "best" else "every answer"
        raise UserError(
            "BAD_ARGUMENT",
            f"select={select} keeps {keeps}, so max_per_task={max_per_task} would do nothing",
            hint='select="best_n" keeps the best max_per_task answers, "correct" the correct ones.',
            field="max_per_task",
        )


def ranked(group: Sequence[Attempt], select: str) -> tuple[list[Attempt], list[Attempt]]:
    """Divide the attempts of a group into those that `select` may take and those it rules out.

    Returns (candidates, the preferred ones first; attempts ruled out). "correct" and "shortest"
    rule out attempts that are not correct; any other `select` rules out none.
    """
    if select in ("correct", "shortest"):
        candidates = [attempt for attempt in group if attempt.correct]
        ruled_out = [attempt for attempt in group if not attempt.correct]
    else:
        candidates, ruled_out = list(group), []
    return _by_preference(candidates, select), ruled_out


def _by_preference(attempts: Sequence[Attempt], select: str) -> list[Attempt]:
    """Sort attempts by how much `select` prefers them.

    - shortest: the shortest first; among equally short ones the higher reward first.
    - all: in the order of `sort_key`.
    - any other: the highest reward first; among equal rewards the shorter first.
    """
    if select == "shortest":
        return sorted(
            attempts, key=lambda attempt: (attempt.tokens, -attempt.reward, attempt.sort_key)
        )
    if select == "all":
        return sorted(attempts, key=lambda attempt: attempt.sort_key)
    return sorted(attempts, key=lambda attempt: (-attempt.reward, attempt.tokens, attempt.sort_key))


def pairs_in(group: Sequence[Attempt]) -> list[tuple[Attempt, Attempt]]:
    """Make pairs of a better and a worse attempt of a group, the most different pair first.

    The best attempt is paired with the worst, the second best with the second worst, and so on. A
    correct attempt is better than one that is not; otherwise the higher reward is better. Attempts
    that are equally good make no pair.
    """
    # Sorted from best to worst; of two with the same reward the shorter one comes first.
    by_quality = sorted(
        group,
        key=lambda attempt: (
            not attempt.correct,
            -attempt.reward,
            attempt.tokens,
            attempt.sort_key,
        ),
    )
    better_half = by_quality[: len(by_quality) // 2]
    worst_first = reversed(by_quality)
    candidates = zip(better_half, worst_first, strict=False)  # ends with the better half
    return [
        (better, worse)
        for better, worse in candidates
        if (better.correct, better.reward) > (worse.correct, worse.reward)
    ]


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of the values; None if there are none."""
    return sum(values) / len(values) if values else None
