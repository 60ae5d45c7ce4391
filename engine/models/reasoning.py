"""Reasoning in what a model writes: the tags around thoughts, and where thoughts stand in a reply.

All such tags are defined here. Families that write thoughts in channels instead of tags have their
reader in `dialects/channels.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# (start, end) of a part of a text, in characters.
Span = tuple[int, int]


@dataclass(frozen=True)
class ThoughtReader:
    """Finds the thoughts (reasoning) in the replies of a model.

    Attributes:
        take_off: splits a reply into (its thought, or None if it has none; the rest of the text).
        spans: given a reply and whether the prompt already opened a thought, returns (start, end)
            of each thought without its tags. A thought that was cut short goes on to the end.
    """

    take_off: Callable[[str], tuple[str | None, str]]
    spans: Callable[[str, bool], list[Span]]


@dataclass(frozen=True)
class Tags:
    """The tags around a thought.

    Attributes:
        opening, closing: the two tags.
        before, after: the same tags with the white space that models write beside them.
    """

    opening: str
    closing: str
    before: str
    after: str


THINK = Tags("<think>", "</think>", "<think>\n", "\n</think>\n\n")
# Read only if the chat template contains the closing tag. `THINK` is always read.
OTHER_TAGS = (
    Tags("[THINK]", "[/THINK]", "[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>", "<seed:think>", "</seed:think>"),
    Tags("<|channel>thought", "<channel|>", "<|channel>thought\n", "\n<channel|>"),
)
# Strings in the chat templates of families that write thoughts in a channel.
CHANNEL_MARKS = ("<|channel|>analysis", "to=self")


def tags_of(template: str) -> tuple[Tags, ...]:
    """Return the tags that may stand around thoughts in a model's replies: always <think>, and
    those of other families whose closing tag is in `template`, the source of its chat template.

    The order matters: if the template writes tags itself, those are the last.
    """
    return (THINK, *(tags for tags in OTHER_TAGS if tags.closing in template))


def has_marks(template: str) -> bool:
    """Tell whether the source of a chat template contains tags or channels of reasoning of any
    family."""
    marks = (*(tags.closing for tags in (THINK, *OTHER_TAGS)), *CHANNEL_MARKS)
    return any(mark in template for mark in marks)


def after_thought(reply: str) -> str:
    """Return a reply without the thought at its beginning, whichever family's tags it has."""
    _thought, answer = tagged_thoughts((THINK, *OTHER_TAGS)).take_off(reply)
    return answer


def opens_thought(prompt: str, template: str) -> bool:
    """Tell whether a prompt that the chat template wrote ends with an opening tag, so that the
    reply begins inside the thought."""
    return prompt.rstrip().endswith(tuple(tags.opening for tags in tags_of(template)))


def opens_any(reply: str) -> bool:
    """Tell whether a reply contains the opening tag of a thought."""
    return any(tags.opening in reply for tags in (THINK, *OTHER_TAGS))


def closes_any(reply: str) -> bool:
    """Tell whether a reply contains the closing tag of a thought."""
    return any(tags.closing in reply for tags in (THINK, *OTHER_TAGS))


def tagged_thoughts(all_tags: Sequence[Tags]) -> ThoughtReader:
    """Make the reader of a thought that stands between tags at the beginning of a reply.

    The first of `all_tags` that the reply uses counts. Its opening tag may be missing, because many
    templates write it in the prompt.
    """

    def take_off(reply: str) -> tuple[str | None, str]:
        """Split a reply into (its thought, the text after the closing tag).

        Returns (None, the whole reply) if there is no closing tag; so a thought that was cut short
        stays in the text.
        """
        for tags in all_tags:
            thought, closing, text_after = reply.partition(tags.closing)
            if closing:  # "" if the reply does not contain this tag
                thought = thought.strip().removeprefix(tags.opening).strip()
                return thought, text_after.lstrip("\n")
        return None, reply

    def spans(reply: str, opened: bool) -> list[Span]:
        """Return where the thought stands in a reply: [(start, end)] in characters, [] if there is
        none.

        `opened` says whether the prompt ended with an opening tag, so that the reply begins inside
        the thought.
        """
        for tags in all_tags:
            if tags.opening in reply or tags.closing in reply:
                return [_first_span(reply, tags)]
        # Without any tag the reply is one thought if the prompt opened one, else it has none.
        return [(0, len(reply))] if opened else []

    return ThoughtReader(take_off, spans)


def _first_span(text: str, tags: Tags) -> Span:
    """Return (start, end) of the first thought in a text that contains one of its `tags`.

    If a closing tag comes first, the thought began before the text. Without a closing tag, the
    thought goes on to the end of the text.
    """
    open_at, close_at = text.find(tags.opening), text.find(tags.closing)  # -1 if missing
    began_earlier = open_at < 0 or 0 <= close_at < open_at
    start = 0 if began_earlier else open_at + len(tags.opening)
    end = close_at if close_at >= start else len(text)
    return start, end
