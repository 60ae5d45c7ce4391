"""What the model said and what it earned: rollouts of training, answers of an evaluation.

Everything returned is data of an environment and a model, cleaned and with secrets hidden.
"""

import ast
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import UserError
from engine.core.filters import Where
from engine.core.hints import Call, Hint
from engine.core.reply import BODY_CHARS
from engine.evidence.verdict.sides import result_step
from engine.home.halves import ABOUT_HALF
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.sanitize import Redactor, clip, json_chars, redactor_for
from engine.home.store import Store
from engine.reading.transcripts import (
    Decode,
    Texts,
    decoder_of,
    length_in_tokens,
    rollout_item,
    squeezed,
    turns_of,
    within,
)
from engine.records.lines.curves import short
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.trajectory_record import TrajectoryRecord, read_trajectories
from engine.records.run_config import RunConfig

PICKS = ("worst", "best", "random", "median", "truncated", "error", "group", "changed")
MOST = 50
_CHARS = (40, 8000)
_ALL_BYTES = 48_000_000  # of rollouts, when a filter looks at every step
_ALL = "all"  # in a cursor, before the last step that counts
_NAMES = (
    "step", "task", "group", "member", "reward", "success", "advantage", "length", "stop_reason",
    "error", "turns", "attempt", "half", "model", "metrics",
)  # fmt: skip

Row = TrajectoryRecord | EvaluationRow


@dataclass(frozen=True)
class _Source:
    """Rows to pick from. `step` is a training step, or the index of a model in an evaluation; with
    `every` the rows are of all steps up to it, and `missing` are the older ones not read.
    `trained`: they were trained on, where a score that failed is left out; an exam counts it as 0.
    """

    rows: Sequence[Row]
    what: str
    step: int
    every: bool = False
    missing: int = 0
    trained: bool = False

    @property
    def mark(self) -> str:
        """The step as a cursor keeps it."""
        return f"{_ALL}{self.step}" if self.every else str(self.step)


@dataclass(frozen=True)
class _Ask:
    """The arguments of one call, checked."""

    run: RunDir
    row: RunRow
    redact: Redactor
    pick: str
    where: str
    tokens: bool
    limit: int
    max_chars: int
    skip: int
    decode: Decode | None = None

    def texts(self, chars: int, *, prompt: bool = True) -> Texts:
        return Texts(chars, prompt, self.tokens, self.decode)


def read_rollouts(
    home: Home,
    run_id: str,
    pick: str = "worst",
    step: int = -1,
    where: str = "",
    tokens: bool = False,
    limit: int = 3,
    max_chars: int = 1200,
    cursor: str = "",
) -> dict[str, Any]:
    """A few rollouts of one step, chosen by `pick`.

    worst, best, median: by reward. random: a seeded order. truncated, error: only those. group:
    whole groups with their advantages, the widest spread of rewards first. changed: the same
    held-out task before and after (in an evaluation: by the first model and this one), the
    largest change first.

    Args:
        step: training step, -1 for the latest; in an evaluation the index of the model, -1 for
            the last. For changed: the evaluated step to hold against step 0. A `where` that names
            `step` looks at all steps unless one is given here.
        where: an expression over step, task, group, reward, success, advantage, length,
            stop_reason, error, model and named metrics (see engine.core.filters).
        tokens: also the token ids with their loss mask, where they were kept.
        limit: 1 to 50 rollouts or groups.
        max_chars: text per rollout, 40 to 8000.

    Raises UserError RUN_NOT_FOUND, BAD_ARGUMENT, BAD_CURSOR or NO_EVALUATION.
    """
    _check(pick, limit, max_chars)
    with Store(home) as store:
        row = store.get_run(run_id)
    run = home.run(row.run_id)
    config = run.find_config()  # what is left of a run with a damaged config is shown
    skip, step, every = _parse_cursor(cursor, pick, step)
    decode = decoder_of(config) if tokens else None
    redact = redactor_for(home, config.env_dir if config else None)
    ask = _Ask(run, row, redact, pick, where, tokens, limit, max_chars, skip, decode)
    if pick == "changed":
        return _changed(ask, config, step)
    every = every or (step == -1 and _names_step(where))
    source = _every_step(ask, step) if every and run.rollout_steps() else None
    source = source or _source(ask, config, step)
    chosen = _filtered(source.rows, where)
    if pick == "group":
        return _groups(ask, source, chosen)
    ordered = _ordered(chosen, pick, source.step, run.id)
    items = [
        rollout_item(ask.redact, found, ask.texts(ask.max_chars))
        for found in ordered[skip : skip + limit]
    ]
    result = {
        "summary": "",
        "run_id": row.run_id,
        "step": source.step,
        "source": source.what,
        **_models_of(ask, config),
        "matching": len(ordered),
        **({"about": {"half": ABOUT_HALF}} if any(item.get("half") for item in items) else {}),
        "rollouts": items,
    }
    _fitted(ask, result, "rollouts", len(ordered), source.mark)
    result["warnings"] += _left_out(source)
    result["summary"] = _sentence(ask, source, len(items), len(ordered), chosen)
    return result


def _when_it_has(run_id: str, **until: str) -> Hint:
    return Hint("Wait until it has some:", Call("wait_run", {"run_id": run_id, **until}))


def _source(ask: _Ask, config: RunConfig | None, step: int) -> _Source:
    if ask.run.deleted.exists():
        raise UserError(
            "NO_EVALUATION",
            f"{ask.row.run_id} has no rollouts: its files were deleted",
            hint=Hint("Read another run:", Call("get_status", {"scope": "runs"})),
        )
    if ask.row.kind != "train":
        return _model_answers(ask, config, step)
    steps = ask.run.rollout_steps()
    if steps:
        chosen = _one_of(steps, step, "rollouts")
        rows = read_trajectories(ask.run.rollouts(chosen))
        return _Source(rows, f"rollouts of step {chosen}", chosen, trained=True)
    steps = ask.run.eval_steps()
    if not steps:
        raise UserError(
            "NO_EVALUATION",
            f"{ask.row.run_id} has no rollouts yet (it is {ask.row.state})",
            hint=_when_it_has(ask.row.run_id, until="next_eval"),
        )
    chosen = _one_of(steps, step, "held-out answers")
    return _Source(
        read_evaluation(ask.run.evals(chosen)), f"held-out answers at step {chosen}", chosen
    )


def _names_step(where: str) -> bool:
    """Whether an expression looks at the step; one that cannot be read is refused later."""
    try:
        tree = ast.parse(where.strip() or "0", mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Name) and node.id == "step" for node in ast.walk(tree))


def _every_step(ask: _Ask, last: int) -> _Source:
    """The rollouts of all steps up to `last` (-1: the latest), the newest where there are many."""
    steps = [step for step in ask.run.rollout_steps() if last == -1 or step <= last]
    rows: list[list[TrajectoryRecord]] = []
    room = _ALL_BYTES
    for step in reversed(steps):
        path = ask.run.rollouts(step)
        room -= path.stat().st_size
        if room < 0 and rows:
            break
        rows.append(read_trajectories(path))
    read = [row for found in reversed(rows) for row in found]
    missing = len(steps) - len(rows)
    return _Source(read, f"rollouts of {len(rows)} steps", steps[-1], True, missing, trained=True)


def _left_out(source: _Source) -> list[str]:
    if not source.missing:
        return []
    return [f"The oldest {source.missing} steps were not read; name one with step=... to see it."]


def _model_answers(ask: _Ask, config: RunConfig | None, step: int) -> _Source:
    models = config.model_refs if config else []
    played = [i for i in range(len(models)) if ask.run.model_evals(i).exists()]
    if not played:
        raise UserError(
            "NO_EVALUATION",
            f"{ask.row.run_id} has no answers yet (it is {ask.row.state})",
            hint=_when_it_has(ask.row.run_id),
        )
    chosen = _one_of(played, step, "answers, by index of the model,")
    return _Source(
        read_evaluation(ask.run.model_evals(chosen)),
        f"answers of {models[chosen]}",
        chosen,
    )


def _models_of(ask: _Ask, config: RunConfig | None) -> dict[str, list[str]]:
    """The models of an evaluation; `step` is an index into them."""
    if ask.row.kind == "train":
        return {}
    return {"models": config.model_refs if config else []}


def _one_of(steps: Sequence[int], step: int, what: str) -> int:
    if step == -1:
        return steps[-1]
    if step in steps:
        return step
    near = sorted(steps, key=lambda other: abs(other - step))[:5]
    raise UserError(
        "BAD_ARGUMENT",
        f"there are no {what} of step {step}",
        hint=f"Nearest steps: {', '.join(map(str, sorted(near)))}; the last is {steps[-1]}.",
        field="step",
    )


def _filtered(rows: Sequence[Row], where: str) -> list[Row]:
    if not where.strip():
        return list(rows)
    metrics = {name for row in rows for name in row.metrics or {}}
    rule = Where(where, [*_NAMES, *(name for name in metrics if name.isidentifier())])
    return [row for row in rows if rule.matches(_values(row), row.task)]


def _values(row: Row) -> dict[str, Any]:
    """What an expression may ask of a row, by name."""
    metrics = dict(row.metrics or {})
    fixed = {name: getattr(row, name, None) for name in _NAMES}
    return metrics | fixed | {"length": length_in_tokens(row), "metrics": metrics}


def _ordered(rows: Sequence[Row], pick: str, step: int, run_id: str) -> list[Row]:
    if pick == "truncated":
        return [row for row in rows if row.cut]
    if pick == "error":
        return [row for row in rows if row.error]
    if pick == "random":
        order = list(rows)
        random.Random(f"{run_id} {step}").shuffle(order)
        return order
    scored = [row for row in rows if row.reward is not None]
    scored = scored or [row for row in rows if _loss(row) is not None]
    if pick == "median":
        middle = sorted(_score(row) for row in scored)[len(scored) // 2] if scored else 0.0
        return sorted(scored, key=lambda row: abs(_score(row) - middle))
    return sorted(scored, key=_score, reverse=pick == "best")


def _loss(row: Row) -> float | None:
    return row.loss if isinstance(row, EvaluationRow) else None


def _score(row: Row) -> float:
    """The reward, or where nothing scores minus the loss: higher is better."""
    return row.reward if row.reward is not None else -(_loss(row) or 0.0)


# --- groups -----------------------------------------------------------------------------------


def _groups(ask: _Ask, source: _Source, matching: Sequence[Row]) -> dict[str, Any]:
    """Whole groups of which at least one member matches `where`."""
    wanted = {_group_key(row) for row in matching}
    members: dict[str, list[Row]] = {}
    for row in source.rows:
        if _group_key(row) in wanted:
            members.setdefault(_group_key(row), []).append(row)
    ordered = sorted(members.values(), key=lambda group: (-_spread(group), _group_key(group[0])))
    shown = ordered[ask.skip : ask.skip + ask.limit]
    items = [_group_item(ask, group) for group in shown]
    flat = sum(_spread(group) == 0.0 for group in members.values())
    result = {
        "summary": "",
        "run_id": ask.row.run_id,
        "step": source.step,
        "source": source.what,
        "matching": len(ordered),
        "groups": items,
    }
    _fitted(ask, result, "groups", len(ordered), source.mark)
    result["warnings"] += _left_out(source)
    result["summary"] = (
        f"{len(items)} of {len(ordered)} groups among the {source.what} in {ask.row.run_id}, the "
        f"widest spread of rewards first; in {flat} all rewards are equal."
    )
    return result


def _group_key(row: Row) -> str:
    if isinstance(row, TrajectoryRecord):
        return f"{row.step:09d} {row.group:09d}"
    return f"task {row.task}"


def _rewards(rows: Sequence[Row]) -> list[float]:
    """What was earned; a score that failed says nothing of what its answer is worth."""
    return [row.reward for row in rows if not row.error and row.reward is not None]


def _spread(group: Sequence[Row]) -> float:
    rewards = _rewards(group)
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def _group_item(ask: _Ask, group: Sequence[Row]) -> dict[str, Any]:
    rewards = _rewards(group)
    failed = sum(bool(row.error) for row in group)
    each = max(60, ask.max_chars * 2 // (3 * len(group)))
    members = [rollout_item(ask.redact, row, ask.texts(each, prompt=False)) for row in group]
    for member in members:
        for name in ("step", "task", "group", "half"):
            member.pop(name, None)
    first = group[0]
    return {
        "task": clip(ask.redact.text(first.task), 120),
        "step": first.step if isinstance(first, TrajectoryRecord) else None,
        "group": first.group if isinstance(first, TrajectoryRecord) else None,
        "reward_mean": short(math.fsum(rewards) / len(rewards)) if rewards else None,
        "reward_std": short(_spread(group)),
        "solved": sum(row.success is True for row in group),
        **({"errors": failed} if failed else {}),
        "prompt": within(turns_of(ask.redact, first.prompt), max(ask.max_chars // 3, 40)),
        "members": members,
    }


# --- the same task before and after -----------------------------------------------------------


def _changed(ask: _Ask, config: RunConfig | None, step: int) -> dict[str, Any]:
    before, after, names, step = _two_sides(ask, config, step)
    wanted = {id(row) for row in _filtered(after, ask.where)}
    matching = {_task_key(row) for row in after if id(row) in wanted}
    olds = {_task_key(row): row for row in before}
    pairs = [
        (olds[key], row)
        for row in after
        if (key := _task_key(row)) in olds and key in matching and _score_change(olds[key], row)
    ]
    pairs.sort(key=lambda pair: (-abs(_score_change(*pair)), _task_key(pair[1])))
    gained = sum(_score_change(*pair) > 0 for pair in pairs)
    items = [_pair_item(ask, *pair) for pair in pairs[ask.skip : ask.skip + ask.limit]]
    result = {
        "summary": f"{len(pairs)} of {len(olds.keys() & {_task_key(row) for row in after})} tasks "
        f"changed between {names[0]} and {names[1]}: {gained} for the better, "
        f"{len(pairs) - gained} for the worse.",
        "run_id": ask.row.run_id,
        "step": step,
        "before": names[0],
        "after": names[1],
        "matching": len(pairs),
        "changed": items,
    }
    _fitted(ask, result, "changed", len(pairs), str(step))
    return result


def _two_sides(
    ask: _Ask, config: RunConfig | None, step: int
) -> tuple[list[EvaluationRow], list[EvaluationRow], tuple[str, str], int]:
    if ask.row.kind != "train":
        after = _model_answers(ask, config, step)
        models = config.model_refs if config else []
        if len(models) < 2:
            raise UserError(
                "BAD_ARGUMENT",
                f"{ask.row.run_id} evaluated one model, so nothing can have changed",
                hint="Evaluate two models in one call, or pick worst.",
                field="pick",
            )
        other = 0 if after.step else 1
        before, rows = (
            read_evaluation(ask.run.model_evals(index)) for index in (other, after.step)
        )
        return before, rows, (models[other], models[after.step]), after.step
    steps = [found for found in ask.run.eval_steps() if found > 0]
    if not steps or 0 not in ask.run.eval_steps():
        raise UserError(
            "NO_EVALUATION",
            f"{ask.row.run_id} has no held-out evaluation after step 0 yet (it is {ask.row.state})",
            hint=_when_it_has(ask.row.run_id, until="next_eval"),
        )
    chosen = _one_of(steps, step, "held-out answers") if step != -1 else result_step(ask.run)
    chosen = steps[-1] if chosen is None else chosen
    sides = [read_evaluation(ask.run.evals(found)) for found in (0, chosen)]
    return sides[0], sides[1], ("step 0", f"step {chosen}"), chosen


def _task_key(row: EvaluationRow) -> str:
    return f"{row.task} #{row.attempt or 0}"


def _score_change(old: EvaluationRow, new: EvaluationRow) -> float:
    """Change of success, or where it is the same of reward; 0 when neither changed."""
    if old.error or new.error:
        return 0.0
    if old.success is not None and new.success is not None:
        change = float(new.success) - float(old.success)
        if change:
            return change
    return _score(new) - _score(old)


def _pair_item(ask: _Ask, old: EvaluationRow, new: EvaluationRow) -> dict[str, Any]:
    texts = Texts(max(ask.max_chars // 2, 40), prompt=False, tokens=ask.tokens)
    sides = [rollout_item(ask.redact, row, texts) for row in (old, new)]
    for side in sides:
        for name in ("task", "half", "group", "model"):
            side.pop(name, None)
    return {
        "task": clip(ask.redact.text(new.task), 120),
        "change": short(_score_change(old, new)),
        "prompt": within(turns_of(ask.redact, new.prompt), max(ask.max_chars // 3, 40)),
        "before": sides[0],
        "after": sides[1],
    }


# --- pages ------------------------------------------------------------------------------------


def _fitted(ask: _Ask, result: dict[str, Any], key: str, total: int, mark: str) -> None:
    """Add warnings, next and the cursor, and make the page fit.

    Rollouts are dropped from its end; a single one that does not fit is cut.
    """
    items = result[key]
    result |= {"warnings": [], "next": [], "next_cursor": ""}
    most = BODY_CHARS - 400  # the summary is said once the number shown is known
    while json_chars(result) > most and len(items) > 1:
        items.pop()
    if json_chars(result) > most:
        items[0] = squeezed(items[0], most - 600)
        result["warnings"] = ["One rollout alone was too long and is cut; see max_chars."]
    reached = ask.skip + len(items)
    if reached < total and items:
        result["next_cursor"] = f"{ask.pick}:{mark}:{reached}"


def _sentence(ask: _Ask, source: _Source, shown: int, matching: int, rows: Sequence[Row]) -> str:
    """Which rows these are of how many, and the mean reward as the run's metrics have it."""
    told = f"{ask.pick} {source.what}"
    if ask.pick in ("error", "truncated"):  # which rows, not an order of them
        told = f"{source.what} " + ("with an error" if ask.pick == "error" else "cut short")
    said = f"{shown} of {matching} {told} in {ask.row.run_id}"
    rewards, failed = _rewards(rows), sum(bool(row.error) for row in rows)
    if rewards:
        counted = len(rewards) if source.trained else len(rewards) + failed
        said += f"; mean reward {math.fsum(rewards) / counted:.3g} over {counted}"
    if failed:
        counts = "left out" if source.trained else "reward 0"
        said += f"; {failed} could not be scored" + (f" ({counts})" if rewards else "")
    return said + "."


def _check(pick: str, limit: int, max_chars: int) -> None:
    if pick not in PICKS:
        raise _bad("pick", f"pick {pick!r} does not exist", f"Picks: {', '.join(PICKS)}.")
    if isinstance(limit, bool) or not 1 <= limit <= MOST:
        raise _bad("limit", f"limit {limit} is not from 1 to {MOST}", "Use limit=3.")
    if isinstance(max_chars, bool) or not _CHARS[0] <= max_chars <= _CHARS[1]:
        raise _bad(
            "max_chars",
            f"max_chars {max_chars} is not from {_CHARS[0]} to {_CHARS[1]}",
            "Use max_chars=1200.",
        )


def _parse_cursor(cursor: str, pick: str, step: int) -> tuple[int, int, bool]:
    """(rollouts to skip, the step they were read from, whether from all steps up to it)."""
    if not cursor:
        return 0, step, False
    parts = cursor.split(":")
    every = len(parts) == 3 and parts[1].startswith(_ALL)
    if every:
        parts[1] = parts[1].removeprefix(_ALL)
    good = len(parts) == 3 and parts[0] == pick
    if not good or not all(n.isascii() and n.isdigit() and len(n) < 10 for n in parts[1:]):
        raise UserError(
            "BAD_CURSOR",
            f"cursor {cursor[:60]!r} was not made by pick={pick}",
            hint="Pass next_cursor of the last page unchanged with the same pick and where, or "
            "leave it out.",
            field="cursor",
        )
    return int(parts[2]), int(parts[1]), every


def _bad(field: str, message: str, hint: str) -> UserError:
    return UserError("BAD_ARGUMENT", message, hint=hint, field=field)
