"""The synthetic runs of the evidence tests, in the home every test has."""

from tests.engine.evidence.conftest import make_run, rows  # noqa: F401
