"""Which of a model's attempts become training rows: groups, rules over them, choices within them.

Attempts are grouped by environment version, task and model. A rule such as `0 < avg < 1 and n >= 4`
keeps or drops a whole group; `select` then takes attempts out of it, ties decided the same way
whatever order the sources came in. Pure functions over attempts that are already loaded.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import UserError
from engine.core.filters import Where
from engine.evidence.stats.inference import pass_at_k
from envs.json_types import ChatMessage

SELECTS = ("correct", "best", "best_n", "shortest", "all")
WHOLE = ("best", "all")  # selections that say themselves how many they keep
NAMES = (
    "avg", "best", "worst", "solved", "n", "n_correct", "n_error", "length", "task", "model",
    "metrics",
)  # fmt: skip
EXAMPLE = "0 < avg < 1 and n_correct >= 2"
# Text in quotes is left alone; what is left may hold `name@k`.
_AT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|([^\W\d]\w*)?\s*@\s*(\w*)""")
_MOST_K = 1024


@dataclass(frozen=True)
class Attempt:
    """One rollout or one answer of an evaluation, with where it came from.

    `member` counts attempts at a task within its source and step; `tokens` are those the model
    wrote; `env_hash` is the environment version's content hash.
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
        return self.env_id.partition("@")[2]

    @property
    def correct(self) -> bool:
        """Success where the environment says so, else a positive reward; never with an error."""
        if self.error is not None:
            return False
        return self.success if self.success is not None else self.reward > 0

    @property
    def place(self) -> tuple[str, int, int, str, str]:
        """Decides ties: source, step, member, model, then the words."""
        said = "\n".join(str(message.get("content", "")) for message in self.messages)
        return (self.source, self.step, self.member, self.model, said)


Key = tuple[str, str, str]


def groups_of(attempts: Iterable[Attempt], pool_models: bool) -> dict[Key, list[Attempt]]:
    """Attempts by (environment hash, task, model), in that order; one model "" when pooled."""
    found: dict[Key, list[Attempt]] = {}
    for attempt in attempts:
        model = "" if pool_models else attempt.model
        found.setdefault((attempt.env_hash, attempt.task, model), []).append(attempt)
    return {key: sorted(found[key], key=lambda a: a.place) for key in sorted(found)}


class Rule:
    """A `where` of curate: an expression over one task's attempts.

    avg, best, worst: of the reward, over the attempts that were scored. solved: any is correct.
    n, n_correct, n_error: attempts. length: mean tokens. Named metrics: means, bare or as
    metrics["name"]. pass@k: the unbiased chance that one of k attempts is correct.

    Args:
        metrics: the names of the environment's own metrics.

    Raises UserError BAD_ARGUMENT for what is no such expression.
    """

    def __init__(self, expression: str, metrics: Iterable[str] = ()) -> None:
        self.expression = expression
        self.ks: dict[str, int] = {}
        plain = _AT.sub(self._named, expression)
        own = [name for name in metrics if name.isidentifier() and name not in NAMES]
        self._where = Where(plain, [*NAMES, *own, *self.ks], shown=expression, example=EXAMPLE)

    def matches(self, group: Sequence[Attempt]) -> bool:
        """Whether a task's attempts match. A value they do not have makes a comparison false.

        Raises UserError BAD_ARGUMENT naming the task when the expression divides by zero, is
        neither true nor false, or asks for pass@k of fewer than k scored attempts.
        """
        values = facts_of(group)
        for name, k in self.ks.items():
            scored = values["n"] - values["n_error"]
            if k > scored:
                raise self._bad(
                    f"asks for pass@{k}, but task {group[0].task!r} has {scored} scored attempts",
                    f"Evaluate with attempts = {k}, or ask for pass@{max(scored, 1)}.",
                )
            values[name] = pass_at_k(scored, values["n_correct"], k)
        return self._where.matches(values, group[0].task)

    def _named(self, found: re.Match[str]) -> str:
        text, name, k = found.groups()
        if text is not None:
            return text
        if name != "pass":
            raise self._bad(
                f"uses {name or ''}@{k}; only pass takes @k",
                "pass@4 is the chance that one of 4 attempts is correct; avg, best and worst are "
                "over all attempts.",
            )
        if not (k.isascii() and k.isdigit()) or not 1 <= int(k) <= _MOST_K:
            raise self._bad(
                f"uses pass@{k}", f"Write pass@ with a whole number from 1 to {_MOST_K}, as pass@4."
            )
        word = f"pass_at_{int(k)}"
        self.ks[word] = int(k)
        return f" {word} "

    def _bad(self, what: str, hint: str) -> UserError:
        return UserError(
            "BAD_ARGUMENT", f"where {self.expression[:200]!r} {what}", hint=hint, field="where"
        )


def facts_of(group: Sequence[Attempt]) -> dict[str, Any]:
    """What a rule can ask of one task's attempts; means are None where nothing was scored."""
    scored = [attempt for attempt in group if attempt.error is None]
    rewards = [attempt.reward for attempt in scored]
    names = sorted({name for attempt in scored for name in attempt.metrics})
    metrics = {
        name: _mean([a.metrics[name] for a in scored if name in a.metrics]) for name in names
    }
    own: dict[str, Any] = {
        "avg": _mean(rewards),
        "best": max(rewards, default=None),
        "worst": min(rewards, default=None),
        "solved": any(attempt.correct for attempt in group),
        "n": len(group),
        "n_correct": sum(attempt.correct for attempt in group),
        "n_error": len(group) - len(scored),
        "length": _mean([float(attempt.tokens) for attempt in scored]),
        "task": group[0].task,
        "model": group[0].model,
        "metrics": metrics,
    }
    return metrics | own


def check_selection(select: str, max_per_task: int) -> None:
    """Raises UserError BAD_ARGUMENT for a selection that does not exist or a number it ignores."""
    if select not in SELECTS:
        raise UserError(
            "BAD_ARGUMENT",
            f"select={select!r} does not exist",
            hint=f"Use one of {', '.join(SELECTS)}.",
            field="select",
        )
    if isinstance(max_per_task, bool) or not isinstance(max_per_task, int) or max_per_task < 1:
        raise UserError(
            "BAD_ARGUMENT",
            f"max_per_task={max_per_task!r} cannot be used",
            hint="Give a number of answers per task from 1.",
            field="max_per_task",
        )
    if select in WHOLE and max_per_task != 1:
        kept = "the one best answer" if select == "best" else "every answer"
        raise UserError(
            "BAD_ARGUMENT",
            f"select={select} keeps {kept}, so max_per_task={max_per_task} would do nothing",
            hint='select="best_n" keeps the best max_per_task answers, "correct" the correct ones.',
            field="max_per_task",
        )


def ranked(group: Sequence[Attempt], select: str) -> tuple[list[Attempt], list[Attempt]]:
    """The attempts `select` considers, the one to take first in front; and those it rules out.

    correct, best, best_n: by reward, then the shorter. shortest: by tokens, then the reward.
    all: as they came. correct and shortest consider correct attempts alone.
    """
    asks = select in ("correct", "shortest")
    fit = [attempt for attempt in group if attempt.correct or not asks]
    unfit = [attempt for attempt in group if asks and not attempt.correct]
    if select == "shortest":
        fit.sort(key=lambda a: (a.tokens, -a.reward, a.place))
    elif select == "all":
        fit.sort(key=lambda a: a.place)
    else:
        fit.sort(key=lambda a: (-a.reward, a.tokens, a.place))
    return fit, unfit


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
