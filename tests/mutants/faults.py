"""Faults to plant in the engine, each with the tests that must fail for it by their assertions.

A fault replaces `old`, which stands exactly once in `file`, by `new`. `make mutants` plants them
one at a time (run.py); test_faults.py holds the list itself to the tree.
"""

from tests.mutants.forward_faults import FORWARD
from tests.mutants.learning_faults import LEARNING

FAULTS = FORWARD + LEARNING
