"""The synthetic runs of the evidence tests, for what reads runs."""

from tests.engine.evidence.conftest import home, learned_run, make_run, rows  # noqa: F401
