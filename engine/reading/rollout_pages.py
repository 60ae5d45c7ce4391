"""A call of `read_rollouts`: its arguments, its cursor, and making what it answers fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.core.errors import UserError
from engine.core.reply import BODY_CHARS
from engine.home.rows import RunRow
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor
from engine.reading.transcripts import Decode, Texts, chars_of
from engine.records.run_config import RunConfig

PICKS = ("worst", "best", "random", "median", "truncated", "error", "group", "changed")
MOST = 50
_CHARS = (40, 8000)
_ALL_STEPS = "all"  # in a cursor, before the last step that counts
_SUMMARY_CHARS = 400  # kept free for the summary, which follows once the number shown is known
_CUT_CHARS = 600  # kept free beside a single item that has to be cut

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutQuery:
    """What `read_rollouts` is asked for.

    Attributes:
        pick: which rollouts, and in what order; one of `PICKS`.
        step: training step, -1 for the latest; in an evaluation the index of the model, -1 for
            the last. For `changed` the evaluated step to hold against step 0. A `where` that names
            `step` looks at all steps unless one is given here.
        where: an expression over step, task, group, reward, success, advantage, length,
            stop_reason, error, model and named metrics (see engine.core.filters).
        tokens: also the token ids with their loss mask, where they were kept.
        limit: 1 to 50 rollouts or groups.
        max_chars: text per rollout, 40 to 8000.
        cursor: `next_cursor` of the page before, "" for the first page.
    """

    run_id: str
    pick: str = "worst"
    step: int = -1
    where: str = ""
    tokens: bool = False
    limit: int = 3
    max_chars: int = 1200
    cursor: str = ""

    def check(self) -> None:
        """Raises UserError BAD_ARGUMENT for a value that cannot be used."""
        if self.pick not in PICKS:
            raise _bad("pick", f"pick {self.pick!r} does not exist", f"Picks: {', '.join(PICKS)}.")
        if isinstance(self.limit, bool) or not 1 <= self.limit <= MOST:
            raise _bad("limit", f"limit {self.limit} is not from 1 to {MOST}", "Use limit=3.")
        if isinstance(self.max_chars, bool) or not _CHARS[0] <= self.max_chars <= _CHARS[1]:
            raise _bad(
                "max_chars",
                f"max_chars {self.max_chars} is not from {_CHARS[0]} to {_CHARS[1]}",
                "Use max_chars=1200.",
            )


@dataclass(frozen=True)
class Position:
    """Where a page begins.

    Attributes:
        skip: rollouts (groups, tasks) that were shown before.
        step: which step or model is read, as in RolloutQuery.
        all_steps: whether the rollouts are of all steps up to that one.
    """

    skip: int
    step: int
    all_steps: bool


def start_of(query: RolloutQuery) -> Position:
    """Where the page begins. Raises UserError BAD_CURSOR for a cursor of another query."""
    if not query.cursor:
        return Position(0, query.step, all_steps=False)
    pick, *numbers = query.cursor.split(":")
    all_steps = len(numbers) == 2 and numbers[0].startswith(_ALL_STEPS)
    if all_steps:
        numbers[0] = numbers[0].removeprefix(_ALL_STEPS)
    well_formed = len(numbers) == 2 and pick == query.pick
    if not well_formed or not all(n.isascii() and n.isdigit() and len(n) < 10 for n in numbers):
        raise UserError(
            "BAD_CURSOR",
            f"cursor {query.cursor[:60]!r} was not made by pick={query.pick}",
            hint="Pass next_cursor of the last page unchanged with the same pick and where, or "
            "leave it out.",
            field="cursor",
        )
    return Position(int(numbers[1]), int(numbers[0]), all_steps)


@dataclass(frozen=True)
class Reading:
    """A query with the run that it reads.

    Attributes:
        config: None where it is gone or damaged; what is left of the run is shown all the same.
        decode: token ids as text, None where no tokens are asked for or the tokenizer is gone.
    """

    query: RolloutQuery
    start: Position
    run: RunDir
    row: RunRow
    config: RunConfig | None
    redact: Redactor
    decode: Decode | None = None

    @property
    def models(self) -> list[str]:
        """The models of an evaluation, in the order of their indices."""
        return self.config.model_refs if self.config else []

    def texts(self, chars: int, *, prompt: bool = True) -> Texts:
        return Texts(chars, prompt, self.query.tokens, self.decode)

    def shown_part(self, items: Sequence[T]) -> Sequence[T]:
        """Those of all matching items that this page may show."""
        return items[self.start.skip : self.start.skip + self.query.limit]


@dataclass(frozen=True)
class Fitted(Generic[T]):
    """The items that a page has room for, and where the next page begins ("" at the end)."""

    items: list[T]
    warnings: list[str]
    next_cursor: str


def fit(
    reading: Reading,
    items: Sequence[T],
    total: int,
    step_mark: str,
    page_of: Callable[[list[T]], object],
    squeeze: Callable[[T, int], T],
) -> Fitted[T]:
    """As many of the items as a result holds, from the first one on.

    Args:
        total: how many items match in all.
        step_mark: what was read, as `mark_of` writes it into a cursor.
        page_of: the page with those items; it is measured.
        squeeze: an item cut to a number of characters, used where a single one does not fit.
    """
    shown, warnings = list(items), []
    most = BODY_CHARS - _SUMMARY_CHARS
    while chars_of(page_of(shown)) > most and len(shown) > 1:
        shown.pop()
    if shown and chars_of(page_of(shown)) > most:
        shown = [squeeze(shown[0], most - _CUT_CHARS)]
        warnings = ["One rollout alone was too long and is cut; see max_chars."]
    end = reading.start.skip + len(shown)
    more = bool(shown) and end < total
    return Fitted(shown, warnings, f"{reading.query.pick}:{step_mark}:{end}" if more else "")


def mark_of(step: int, *, all_steps: bool = False) -> str:
    """What was read, as a cursor keeps it: one step, or all steps up to one."""
    return f"{_ALL_STEPS}{step}" if all_steps else str(step)


def _bad(field: str, message: str, hint: str) -> UserError:
    return UserError("BAD_ARGUMENT", message, hint=hint, field=field)
