"""Reading a run: what it logged (engine/logs.py) and what the model said (engine/rollouts.py)."""

from engine.logs import VIEWS, read_logs
from engine.rollouts import PICKS, read_rollouts

__all__ = ["PICKS", "VIEWS", "read_logs", "read_rollouts"]
