"""Facts about the task rows of a run that detectors use, read once from the run's environment."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.files import read_lines
from engine.evidence.stats.text_metrics import without_case_and_blanks
from engine.evidence.verdict.contamination import Contamination, read_contamination
from engine.home.run_dir import RunDir
from envs.base import CHOSEN, REJECTED
from envs.json_types import ChatMessage, TaskRow

_TASK_BYTES = 2_000_000  # read of the task rows; enough for shares of them
_WORD = re.compile(r"[^\W\d_]{2,}")
# A word belongs to the wording of the held-out tasks alone if at least _USUAL_WORD of their prompts
# have it, and at most _RARE_WORD of the training prompts. Words of single tasks are far rarer.
_USUAL_WORD, _RARE_WORD = 0.2, 0.01
_FEWEST_PROMPTS = 20  # training and held-out prompts each: shares of fewer mean nothing


@dataclass(frozen=True)
class RowFacts:
    """The task rows of a run in numbers.

    Attributes:
        contamination: which held-out tasks stand in the training rows.
        train: how many training rows were read.
        different: how many different (prompt, answer) pairs they have.
        contradicted: how many rows have the same prompt as another row, but another answer.
        pairs: how many rows have a better and a worse answer (for DPO).
        alike_pairs: how many of those answers differ in case, blanks or punctuation alone.
        exam_words: words that are usual in held-out prompts (the exam) and missing in training
            prompts.
    """

    contamination: Contamination = field(default_factory=Contamination)
    train: int = 0
    different: int = 0
    contradicted: int = 0
    pairs: int = 0
    alike_pairs: int = 0
    exam_words: tuple[str, ...] = ()


def read_row_facts(run: RunDir) -> RowFacts:
    """The facts about a run's task rows; only the first `_TASK_BYTES` of the file are read.

    All counts are 0 if the run's config or the file of tasks is missing.
    """
    contamination = read_contamination(run)
    config = run.find_config()
    if config is None:
        return RowFacts(contamination)
    rows, _ = read_lines(Path(config.env_dir) / "tasks.jsonl", 0, max_bytes=_TASK_BYTES)
    return facts_of_rows(rows, contamination)


def facts_of_rows(rows: Sequence[TaskRow], contamination: Contamination) -> RowFacts:
    """The facts about these rows, training and held-out; rows without a prompt are left out."""
    with_prompt = [row for row in rows if "prompt" in row]
    train = [row for row in with_prompt if row.get("split") not in ("heldout", "dev")]
    heldout = [row for row in with_prompt if row.get("split") == "heldout"]
    pairs = [pair for pair in map(_answer_pair, train) if pair is not None]  # (better, worse)
    alike_pairs = sum(
        _without_end_punctuation(better) == _without_end_punctuation(worse)
        for better, worse in pairs
    )
    return RowFacts(
        contamination=contamination,
        train=len(train),
        different=len({_key_of_row(row) for row in train}),
        contradicted=_contradicted(train),
        pairs=len(pairs),
        alike_pairs=alike_pairs,
        exam_words=_words_of_the_exam(train, heldout),
    )


def _key_of_row(row: TaskRow) -> tuple[str, str]:
    """(prompt, answer) without case and blanks: two rows with equal keys are the same."""
    return (
        without_case_and_blanks(_text(row["prompt"])),
        without_case_and_blanks(_text(row.get("answer") or "")),
    )


def _contradicted(rows: Iterable[TaskRow]) -> int:
    """How many rows have the same prompt as another row, but another answer. Rows without an answer
    do not count."""
    answer_counts: dict[str, Counter[str]] = {}  # prompt -> answer -> how many rows have both
    for row in rows:
        prompt, answer = _key_of_row(row)
        if answer:
            answer_counts.setdefault(prompt, Counter())[answer] += 1
    return sum(counts.total() for counts in answer_counts.values() if len(counts) > 1)


def _answer_pair(row: TaskRow) -> tuple[str, str] | None:
    """(better answer, worse answer) of a row, as text. Returns None if one of them is missing."""
    metadata = row.get("metadata") or {}
    better = metadata.get(CHOSEN) or row.get("answer")  # without a pair: the reference answer
    worse = metadata.get(REJECTED)
    if not better or not worse:
        return None
    return _last_text(better), _last_text(worse)


def _last_text(answer: Sequence[ChatMessage] | str) -> str:
    """The text of an answer: the answer itself if it is text, or the content of its last
    message."""
    return answer if isinstance(answer, str) else _text(answer[-1:])


def _without_end_punctuation(answer: str) -> str:
    """The answer without case and blanks, and without punctuation at its ends, to tell whether two
    answers differ in more than that."""
    text = without_case_and_blanks(answer)
    punctuation = ' .,;:!?"`' + "'"
    return text.strip(punctuation)


def _words_of_the_exam(train: Sequence[TaskRow], heldout: Sequence[TaskRow]) -> tuple[str, ...]:
    """The words that are usual in held-out prompts (the exam) and rare in training prompts, the
    most usual first.

    Returns () if there are fewer than `_FEWEST_PROMPTS` training or held-out rows.
    """
    if min(len(train), len(heldout)) < _FEWEST_PROMPTS:
        return ()
    train_shares, heldout_shares = _word_shares(train), _word_shares(heldout)
    words = [
        word
        for word, share in heldout_shares.items()
        if share >= _USUAL_WORD and train_shares.get(word, 0.0) <= _RARE_WORD
    ]
    return tuple(sorted(words, key=lambda word: (-heldout_shares[word], word)))


def _word_shares(rows: Sequence[TaskRow]) -> Mapping[str, float]:
    """The share of the rows whose prompt has a word, for each word."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(set(_WORD.findall(_text(row["prompt"]).lower())))
    return {word: count / len(rows) for word, count in counts.items()}


def _text(messages: Sequence[ChatMessage] | str) -> str:
    """The contents of messages, joined by line breaks; a text is returned as it is."""
    if isinstance(messages, str):
        return messages
    return "\n".join(str(message.get("content") or "") for message in messages)
