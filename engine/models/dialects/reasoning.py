"""Thoughts between tags, such as `<think>...</think>`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Takes the thought off a reply: (the thought, None where there is none; the rest).
Thoughts = Callable[[str], tuple[str | None, str]]


@dataclass(frozen=True)
class Tags:
    """What stands before and after a thought."""

    opening: str
    closing: str


THINK = Tags("<think>", "</think>")
# Read where a chat template names the closing one; `THINK` is read always.
OTHER_TAGS = (
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|channel>thought", "<channel|>"),
)


def tags_of(template: str) -> tuple[Tags, ...]:
    """The tags that may stand around thoughts in the replies of a model, by the source of its chat
    template."""
    return (THINK, *(tags for tags in OTHER_TAGS if tags.closing in template))


def tagged_thoughts(all_tags: Sequence[Tags]) -> Thoughts:
    """A function that takes off the thought that comes first in a reply, up to its closing tag.

    The opening tag may be missing, because many templates write it in the prompt. A thought without
    its end stays in the rest. `all_tags` are tried in order; the first whose closing tag stands in
    the reply decides.
    """

    def take_off(text: str) -> tuple[str | None, str]:
        for tags in all_tags:
            thought, closing, rest = text.partition(tags.closing)
            if closing:
                thought = thought.strip().removeprefix(tags.opening).strip()
                return thought, rest.lstrip("\n")
        return None, text

    return take_off
