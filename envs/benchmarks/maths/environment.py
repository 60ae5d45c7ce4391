"""Competition mathematics whose answer is an expression in a box: MATH-500.

Reads `problem`, `solution`, `answer`, `subject` and `level`. Two expressions are equal if they are
the same number, or the same text once spacing and notation that means nothing are taken away. So
an answer in another correct form, such as x+1 for 1+x, counts as wrong.
"""

import re

from envs import Score, SingleTurnEnv, Task
from envs.rewards import final_answer, parse_number
from envs.strict_rows import tasks_beside

ASKED_FORM = "Put the final answer in \\boxed{}."
# Commands that change only how a formula looks.
SPACING = re.compile(r"\\(?:left|right|,|;|!|:| |quad|qquad)(?![a-zA-Z])")
TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"\\frac\s*([0-9a-z])\s*([0-9a-z])")
SIMPLE_FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}")


class Mathematics(SingleTurnEnv):
    """One task per row of the data files; a file's name says its split."""

    def tasks(self) -> list[Task]:
        """Return every problem, with its solution as the reference answer."""
        return tasks_beside(__file__, task_of)

    def score(self, task: Task, completion: str) -> Score:
        """Return 1 for the right expression, else 0. The metric `boxed` is 1 if the answer has a
        box."""
        is_right = same_expression(final_answer(completion), task.metadata["expression"])
        has_box = "\\boxed{" in completion
        return Score(float(is_right), success=is_right, metrics={"boxed": float(has_box)})


def task_of(row: dict, task_id: str, split: str | None) -> Task:
    """Make the task of a row; its category is the subject and the level."""
    expression = str(row["answer"])
    solution = str(row.get("solution") or "").strip()
    # The reference answer must end with the right expression, or the scorer would not accept it.
    if not same_expression(final_answer(solution), expression):
        solution = f"{solution}\n\\boxed{{{expression}}}".strip()
    category = f"{row.get('subject', '')} {row.get('level', '')}".strip()
    return Task(
        task_id,
        f"{str(row['problem']).strip()}\n{ASKED_FORM}",
        answer=solution,
        split=split,
        metadata={"expression": expression, "category": category},
    )


def same_expression(left: str, right: str) -> bool:
    """Whether two expressions are the same number, or the same text in `normal_form`."""
    left, right = normal_form(left), normal_form(right)
    left_number, right_number = parse_number(left), parse_number(right)
    if left_number is not None and right_number is not None:
        return left_number == right_number
    return left == right and left != ""


def normal_form(expression: str) -> str:
    """Return the expression with simple fractions as a/b, without dollar signs, spacing and
    commands for text."""
    text = expression.strip().strip("$").rstrip(".").replace("\\dfrac", "\\frac")
    text = text.replace("\\tfrac", "\\frac").replace("\\%", "").replace("\\$", "")
    text = SPACING.sub("", text)
    text = TEXT.sub(r"\1", text)
    text = text.replace("^\\circ", "").replace("^{\\circ}", "")
    text = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    fraction = SIMPLE_FRACTION.fullmatch("".join(text.split()))
    if fraction:
        return f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    return "".join(text.split())


def load_environment() -> Mathematics:
    """Return the environment; it takes no parameters."""
    return Mathematics()
