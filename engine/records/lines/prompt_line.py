"""A prompt that a search tried: a line of `prompts.jsonl`."""

from pathlib import Path

from engine.records.lines.answer import Text
from engine.records.lines.line_record import LineRecord


class PromptLine(LineRecord):
    """One set of texts, and what was earned with it; None for what was not measured.

    Attributes:
        round: of the search; 0 for the environment's own texts.
        texts: by name: "system", and "tool NAME" for what a tool says of itself.
        before, after: mean reward on the train tasks of the round, with the texts that it was made
            from and with these.
        chosen_by: mean reward on the tasks that choose among prompts.
        env_id: the environment version that was made of it; None where it was not chosen.
    """

    round: int
    texts: dict[str, Text]
    before: float | None = None
    after: float | None = None
    chosen_by: float | None = None
    env_id: str | None = None


def chosen_prompt(path: Path) -> PromptLine | None:
    """Return the prompt in the file at `path` that an environment version was made of: the one that
    the search chose. Return None if there is none."""
    pushed_prompts = [line for line in PromptLine.read_all(path) if line.env_id]
    return pushed_prompts[-1] if pushed_prompts else None
