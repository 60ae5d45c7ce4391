"""A call of `read_rollouts`: its arguments, its cursor, and fitting its reply into the limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.core.errors import UserError
from engine.core.reply import (
    BODY_CHARS,
    LEAST_ROLLOUT_CHARS,
    MOST_ROLLOUT_CHARS,
    MOST_ROLLOUTS,
    RESULT_CHARS,
)
from engine.home.rows import RunRow
from engine.home.run_dir import RunDir
from engine.home.sanitize import Redactor
from engine.records.run_config import RunConfig
from engine.runs.reading.transcripts import Decode, Texts, chars_of

PICKS = ("worst", "best", "random", "median", "truncated", "error", "group", "changed")
_ALL_STEPS = "all"  # a cursor that begins "all40" reads all steps up to 40
_MOST_DIGITS = 9  # of a number in a cursor
_SUMMARY_CHARS = 400  # kept free for the summary, which is written after all else is known
_CUT_CHARS = 600  # kept free for the rest of the page if a single item has to be cut

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutQuery:
    """The arguments of `read_rollouts`.

    Attributes:
        pick: which rollouts to show and in what order; one of `PICKS`.
        step: training step, -1 for the latest; in an evaluation the index of the model, -1 for all
            models. For `changed` the evaluated step that is compared with step 0, or the model that
            is compared with the first; -1 for the last. If it is -1 and `where` names `step`, all
            steps are read.
        where: an expression over step, task, group, reward, success, advantage, length,
            stop_reason, error, model and named metrics (see engine.core.filters).
        tokens: whether to show token ids with their loss mask, if they were kept.
        limit: the most rollouts or groups of a page, 1 to MOST_ROLLOUTS.
        max_chars: characters of text per rollout, LEAST_ROLLOUT_CHARS to MOST_ROLLOUT_CHARS.
        cursor: `next_cursor` of the page before; "" for the first page.
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
        """Raise UserError BAD_ARGUMENT if pick, limit or max_chars is not an allowed value.

        `step`, `where` and `cursor` are checked when they are used.
        """
        if self.pick not in PICKS:
            raise _bad_argument(
                "pick", f"pick {self.pick!r} does not exist", f"Picks: {', '.join(PICKS)}."
            )
        _check_within("limit", self.limit, 1, MOST_ROLLOUTS)
        _check_within("max_chars", self.max_chars, LEAST_ROLLOUT_CHARS, MOST_ROLLOUT_CHARS)


def _check_within(field: str, value: int, least: int, most: int) -> None:
    """Raise UserError BAD_ARGUMENT if `value` of the argument `field` is not from `least` to
    `most`. The hint names the nearest value that is allowed."""
    # A bool is refused: in Python True is an int, but a caller who passes it means no number.
    if isinstance(value, bool) or not least <= value <= most:
        raise _bad_argument(
            field,
            f"{field} {value} is not from {least} to {most}",
            f"Use {field}={min(max(value, least), most)}.",
        )


@dataclass(frozen=True)
class Position:
    """The place where a page begins.

    Attributes:
        skip: number of rollouts (groups, tasks) on earlier pages.
        step: the training step or model index, as in RolloutQuery.
        all_steps: whether the rollouts of all steps up to `step` are read.
    """

    skip: int
    step: int
    all_steps: bool


def start_of(query: RolloutQuery) -> Position:
    """Return where the page begins: at the query's cursor, or at its step if it has no cursor. A
    cursor is "pick:step:skip", such as "worst:40:3", or "worst:all40:3" for all steps up to 40.

    Raises UserError BAD_CURSOR if the cursor is of another pick or was changed.
    """
    if not query.cursor:
        return Position(skip=0, step=query.step, all_steps=False)
    pick, _, step_and_skip = query.cursor.partition(":")
    all_steps = step_and_skip.startswith(_ALL_STEPS)
    numbers = step_and_skip.removeprefix(_ALL_STEPS).split(":")
    well_formed = len(numbers) == 2 and pick == query.pick
    if not well_formed or not all(_is_number(number) for number in numbers):
        raise UserError(
            "BAD_CURSOR",
            f"cursor {query.cursor[:60]!r} was not made by pick={query.pick}",
            hint="Pass next_cursor of the last page unchanged with the same pick and where, or "
            "leave it out.",
            field="cursor",
        )
    step, skip = numbers
    return Position(skip=int(skip), step=int(step), all_steps=all_steps)


def _is_number(text: str) -> bool:
    """Whether the text is a number from 0, in ASCII digits, of at most `_MOST_DIGITS` digits."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


@dataclass(frozen=True)
class Reading:
    """A query, with the run that it reads.

    Attributes:
        start: where the page begins.
        config: the run's config; None if it is gone or damaged, which does not stop the reading.
        decode: turns token ids into text; None if the query wants no tokens, or if the tokenizer is
            gone.
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
        """The models of an evaluation, in the order of their indices; [] without a config."""
        return self.config.model_refs if self.config else []

    def texts(self, chars: int, *, with_prompt: bool = True) -> Texts:
        """Say how much text of a row is shown: `chars` characters, with or without the prompt."""
        return Texts(chars, with_prompt, with_tokens=self.query.tokens, decode=self.decode)

    def shown_part(self, items: Sequence[T]) -> Sequence[T]:
        """The items of this page: those after the items of earlier pages, at most `limit` of
        them."""
        return items[self.start.skip : self.start.skip + self.query.limit]


@dataclass(frozen=True)
class Fitted(Generic[T]):
    """The items that fit into a page. `next_cursor` is "" on the last page."""

    items: list[T]
    warnings: list[str]
    next_cursor: str


def fit(
    reading: Reading,
    items: Sequence[T],
    total: int,
    step_mark: str,
    page_of: Callable[[list[T]], object],
    shorten: Callable[[T, int], T],
) -> Fitted[T]:
    """Keep as many of the first items as fit into a reply. If not even the first fits, that item is
    shortened. A warning says so if the page has fewer items than it could show, or a shortened one.

    Args:
        total: number of all matching items, on all pages.
        step_mark: the step or steps that were read, as `mark_of` writes them into a cursor.
        page_of: builds the page with the given items, so that its length can be measured.
        shorten: shortens an item to a number of characters of JSON.
    """
    shown_items = list(items)
    warnings: list[str] = []
    max_chars = BODY_CHARS - _SUMMARY_CHARS  # the summary is written later
    while chars_of(page_of(shown_items)) > max_chars and len(shown_items) > 1:
        shown_items.pop()
    if shown_items and chars_of(page_of(shown_items)) > max_chars:
        shown_items = [shorten(shown_items[0], max_chars - _CUT_CHARS)]
        warnings = ["One rollout alone was too long and is cut; see max_chars."]
    elif len(shown_items) < len(items):
        warnings = [
            f"{len(shown_items)} of {len(items)} fit into one result of {RESULT_CHARS:,} "
            "characters: next_cursor goes on with the others, a smaller max_chars shows more at "
            "once."
        ]
    next_cursor = _cursor_after(reading, len(shown_items), total, step_mark)
    return Fitted(shown_items, warnings, next_cursor)


def _cursor_after(reading: Reading, shown_count: int, total: int, step_mark: str) -> str:
    """Make the cursor of the page after one with `shown_count` items; "" if nothing follows.

    `total` is the number of all matching items, on all pages. `step_mark` is the step or steps that
    were read, as `mark_of` writes them.
    """
    next_skip = reading.start.skip + shown_count
    if not shown_count or next_skip >= total:  # after an empty page, the cursor would not advance
        return ""
    return f"{reading.query.pick}:{step_mark}:{next_skip}"


def mark_of(step: int, *, all_steps: bool = False) -> str:
    """Write the steps that were read as a cursor stores them: "40", or "all40" for all steps up to
    40."""
    return f"{_ALL_STEPS}{step}" if all_steps else str(step)


def _bad_argument(field: str, message: str, hint: str) -> UserError:
    """Make the error BAD_ARGUMENT for the argument `field`."""
    return UserError("BAD_ARGUMENT", message, hint=hint, field=field)
