"""Tasks and scores. An environment imports what it needs from here."""

from envs.base import Env, Message, MultiTurnEnv, Score, SingleTurnEnv, Task, ToolCall

__all__ = ["Env", "Message", "MultiTurnEnv", "Score", "SingleTurnEnv", "Task", "ToolCall"]
