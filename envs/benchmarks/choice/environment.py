"""Multiple choice: ARC, OpenBookQA, CommonsenseQA, MMLU, HellaSwag, SciQ, BoolQ.

What a row may hold beside its question (`question`, `question_stem` or `ctx`):

    choices {"text": [...], "label": [...]} and answerKey     ARC, OpenBookQA, CommonsenseQA
    choices [...] and answer, the index of the right one      MMLU
    endings [...] and label, the index of the right one       HellaSwag
    correct_answer, distractor1, distractor2, distractor3     SciQ, with `support` to read first
    answer true or false                                      BoolQ, with `passage` to read first
"""

import hashlib

from envs import Score, SingleTurnEnv, Task
from envs.rewards import choice
from envs.strict_rows import tasks_beside

LETTERS = "ABCDEFGHIJ"


class MultipleChoice(SingleTurnEnv):
    """One task per row of the data files; a file's name says its split."""

    def tasks(self) -> list[Task]:
        """Return every question with its lettered options; the reference answer is e.g. "Answer:
        B"."""
        return tasks_beside(__file__, task_of)

    def score(self, task: Task, completion: str) -> Score:
        """Return 1 for the right letter or its text, else 0. The metric `readable` is 1 if the
        answer is the letter or text of any option."""
        options = task.metadata["options"]
        right = choice(completion, task.metadata["letter"], options)
        readable = any(choice(completion, letter, options) for letter in options)
        return Score(right, success=right == 1.0, metrics={"readable": float(readable)})


def task_of(row: dict, task_id: str, split: str | None) -> Task:
    """Make the task of a row: a text to read if there is one, the question and its lettered options.

    Raises ValueError if the row has no question or no right option.
    """
    texts, right_index = options_of(row, task_id)
    options = dict(zip(LETTERS, texts, strict=False))  # letter -> text
    question = str(row.get("question") or row.get("question_stem") or row.get("ctx") or "").strip()
    if not question or not 0 <= right_index < len(options):
        raise ValueError(f"{task_id}: no question, or no right option, in {sorted(row)}")
    text_to_read = str(row.get("passage") or row.get("support") or "").strip()
    option_lines = [f"{letter}) {text}" for letter, text in options.items()]
    lines = [text_to_read, question, *option_lines, "End with Answer: and the letter."]
    right_letter = LETTERS[right_index]
    metadata = {"letter": right_letter, "options": options}
    for name in ("subject", "activity_label"):  # how MMLU and HellaSwag name a question's category
        if row.get(name):
            metadata["category"] = str(row[name])
    return Task(
        task_id,
        "\n".join(line for line in lines if line),
        answer=f"Answer: {right_letter}",
        split=split,
        metadata=metadata,
    )


def options_of(row: dict, task_id: str) -> tuple[list[str], int]:
    """Return the texts of a row's options in the order in which they are shown, and the index of the
    right one.

    The index is -1 if the row does not say which is right, as in closed test splits. A row of
    unknown form has no options.
    """
    choices = row.get("choices")
    if isinstance(choices, dict):  # ARC, OpenBookQA, CommonsenseQA
        labels = [str(label) for label in choices["label"]]
        key = str(row.get("answerKey", ""))
        right_index = labels.index(key) if key in labels else -1
        return [str(text) for text in choices["text"]], right_index
    if isinstance(choices, list):  # MMLU
        return [str(text) for text in choices], int(row["answer"])
    if "endings" in row:  # HellaSwag
        label = str(row["label"])
        right_index = int(label) if label.isdigit() else -1
        return [str(text) for text in row["endings"]], right_index
    if "correct_answer" in row:  # SciQ
        return shuffled_options(row, task_id)
    if isinstance(row.get("answer"), bool):  # BoolQ
        right_index = 0 if row["answer"] else 1
        return ["yes", "no"], right_index
    return [], -1


def shuffled_options(row: dict, task_id: str) -> tuple[list[str], int]:
    """Return the options of a SciQ row, in an order that depends on the task's id alone, and the
    index of the right one."""
    correct = str(row["correct_answer"])
    texts = [correct, *(str(row[f"distractor{number}"]) for number in (1, 2, 3))]

    def place(text: str) -> bytes:
        """Return a sort key that is fixed for each text and task."""
        return hashlib.sha256(f"{task_id} {text}".encode()).digest()

    ordered = sorted(texts, key=place)
    return ordered, ordered.index(correct)


def load_environment() -> MultipleChoice:
    """Return the environment; it takes no parameters."""
    return MultipleChoice()
