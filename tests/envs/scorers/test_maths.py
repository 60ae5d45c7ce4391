"""Expressions that mean the same are paid; what is only near, undone or hostile is not."""

import pytest

from envs.scorers import maths


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\boxed{\dfrac12}", "1/2"),
        ("The answer is 3/4.", r"\frac{3}{4}"),
        ("x = 5", "5"),
        ("1,200", "1200"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        ("(x+1)^2", "x^2 + 2x + 1"),
        (r"3\pi", "3*pi"),
        ("{2, 1}", "{1,2}"),
        ("(1, -2)", r"\left(1,-2\right)"),
        ("120", "5!"),
        ("50%", r"50\%"),
        (r"\sqrt[3]{8}", "2"),
        ("-x^2", "-(x^2)"),
    ],
)
def test_the_same_mathematics_is_paid(answer: str, expected: str):
    assert maths(answer, expected) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("0.333", "1/3"),
        ("2+2", "4"),  # the question again
        ("2^3 + 1", "9"),
        ("5 or 6", "5"),
        ("not 5", "5"),
        ("(2, 1)", "(1, 2)"),
        ("{1, 2, 3}", "{1, 2}"),
        ("{1, 1}", "{1, 2}"),
        ("x", "y"),
        ("x^2", "x"),
        ("-x^2", "(-x)^2"),
        ("", "0"),
        ("9" * 400, "9"),
        ("9^9^9^9^9", "9"),
        ("(" * 200 + "1", "1"),
        ("1/0", "1"),
        ("999999999!", "1"),
        ("\\frac{1}{2}}", "1/2"),
    ],
)
def test_what_is_not_the_answer_is_not_paid(answer: str, expected: str):
    assert maths(answer, expected) == 0.0
