"""What of a task can be reworded, and the two stocks of words.

The probe of a model never asks with a text that training draws from: each list of texts has two
parts without a text in common. Changes of order and things left out have no words and are shared.
"""

from typing import Literal, get_args

Kind = Literal["wording", "system", "tools", "options"]
Stock = Literal["training", "probe"]

KINDS: tuple[Kind, ...] = get_args(Kind)
# What training with `vary_wording` changes: an answer is learnt as it stands, so the order of
# options, which may change its letter, is left alone.
TRAINED_KINDS: tuple[Kind, ...] = ("wording", "system", "tools")
LABELS: dict[str, str] = {
    "wording": "prompt framed otherwise",
    "system": "another system message",
    "tools": "tool descriptions reworded",
    "options": "options in another order",
}
