"""The parts of a task that can be reworded, and the two stocks (lists) of words.

The probe of a model (the test of its robustness) never asks with a text that training draws from:
each list of texts has two parts without a common text. Changes of order and omissions need no
words, so both stocks share them.
"""

from typing import Literal, get_args

Kind = Literal["wording", "system", "tools", "options"]
Stock = Literal["training", "probe"]

KINDS: tuple[Kind, ...] = get_args(Kind)
# The kinds that training with `vary_wording` uses. An answer is learnt word by word, so the order
# of options, which may change the answer's letter, stays.
TRAINED_KINDS: tuple[Kind, ...] = ("wording", "system", "tools")
LABELS: dict[str, str] = {
    "wording": "prompt framed otherwise",
    "system": "another system message",
    "tools": "tool descriptions reworded",
    "options": "options in another order",
}
