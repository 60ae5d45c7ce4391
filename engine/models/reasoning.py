"""Reasoning in what a model writes: the marks around thoughts, and where they stand in a reply.

The one home of these marks. Families that write channels instead of tags have their reader in
`dialects/channels.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# (start, end) of a stretch of a text, in characters.
Span = tuple[int, int]


@dataclass(frozen=True)
class ThoughtReader:
    """How thoughts are found in the replies of a model.

    Attributes:
        take_off: takes the thought off a reply: (the thought, None where there is none; the rest).
        spans: where the thoughts of a reply stand, without their marks; a thought that was cut goes
            on to the end. It is also told whether the prompt has opened a thought already.
    """

    take_off: Callable[[str], tuple[str | None, str]]
    spans: Callable[[str, bool], list[Span]]


@dataclass(frozen=True)
class Tags:
    """What stands before and after a thought.

    Attributes:
        opening, closing: the marks.
        before, after: the marks with the white space that models write beside them.
    """

    opening: str
    closing: str
    before: str
    after: str


THINK = Tags("<think>", "</think>", "<think>\n", "\n</think>\n\n")
# Read where a chat template names the closing one; `THINK` is read always.
OTHER_TAGS = (
    Tags("[THINK]", "[/THINK]", "[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>", "<seed:think>", "</seed:think>"),
    Tags("<|channel>thought", "<channel|>", "<|channel>thought\n", "\n<channel|>"),
)
# What a chat template holds of a family that thinks in a channel.
CHANNEL_MARKS = ("<|channel|>analysis", "to=self")


def tags_of(template: str) -> tuple[Tags, ...]:
    """The tags that may stand around thoughts in the replies of a model, by the source of its chat
    template; the last are those that it writes by itself."""
    return (THINK, *(tags for tags in OTHER_TAGS if tags.closing in template))


def has_marks(template: str) -> bool:
    """Whether the source of a chat template holds marks of reasoning, of whatever family."""
    marks = (*(tags.closing for tags in (THINK, *OTHER_TAGS)), *CHANNEL_MARKS)
    return any(mark in template for mark in marks)


def after_thought(reply: str) -> str:
    """A reply without the thought that comes first in it, between tags of whatever family."""
    _, rest = tagged_thoughts((THINK, *OTHER_TAGS)).take_off(reply)
    return rest


def opens_thought(prompt: str, template: str) -> bool:
    """Whether a prompt that the chat template wrote ends with the opening of a thought, so that the
    reply begins inside it."""
    return prompt.rstrip().endswith(tuple(tags.opening for tags in tags_of(template)))


def opens_any(reply: str) -> bool:
    """Whether a reply holds the opening mark of a thought."""
    return any(tags.opening in reply for tags in (THINK, *OTHER_TAGS))


def closes_any(reply: str) -> bool:
    """Whether a reply holds the closing mark of a thought."""
    return any(tags.closing in reply for tags in (THINK, *OTHER_TAGS))


def tagged_thoughts(all_tags: Sequence[Tags]) -> ThoughtReader:
    """The reader of the thought at the beginning of a reply; a closing tag ends the thought.

    Each of `all_tags` is a pair of an opening and a closing tag; the first pair that the reply uses
    counts. The opening tag may be missing, because many templates write it in the prompt.
    """

    def take_off(reply: str) -> tuple[str | None, str]:
        """Split a reply into (its thought, the text after the closing tag).

        (None, the whole reply) if there is no closing tag: a thought that was cut off stays in it.
        """
        for tags in all_tags:
            thought, closing, text_after = reply.partition(tags.closing)
            if closing:  # "" where the reply does not hold this tag
                thought = thought.strip().removeprefix(tags.opening).strip()
                return thought, text_after.lstrip("\n")
        return None, reply

    def spans(reply: str, opened: bool) -> list[Span]:
        """Where the thought stands in a reply: one (start, end) in characters; [] for no thought.

        `opened`: whether the prompt ended with an opening tag, so that the reply begins inside the
        thought.
        """
        for tags in all_tags:
            if tags.opening in reply or tags.closing in reply:
                return [_first_span(reply, tags)]
        # Without any tag the reply is one thought if the prompt opened one, else it has none.
        return [(0, len(reply))] if opened else []

    return ThoughtReader(take_off, spans)


def _first_span(text: str, tags: Tags) -> Span:
    """Where the first thought stands in a text that holds one of its tags. A closing tag without an
    opening one before it ends a thought that began before the text; a thought without a closing tag
    goes on to the end of the text."""
    open_at, close_at = text.find(tags.opening), text.find(tags.closing)  # -1: it is not there
    began_earlier = open_at < 0 or 0 <= close_at < open_at
    start = 0 if began_earlier else open_at + len(tags.opening)
    return start, close_at if close_at >= start else len(text)
