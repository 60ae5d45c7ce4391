"""Tasks and scores. An environment imports what it needs from here.

base.py         Message, Task, Score, the two kinds of environment
code_tests.py   code under tests, in a process of its own
dataset.py      data files to tasks; every bad line by number
json_schema.py  a subset of JSON Schema
json_types.py   JSON objects that pass between processes, by name; strict reading of JSON
judge.py        a model as judge behind hard checks
rewards.py      scorers to combine
row_shapes.py   the shapes of a data row, each as a task
rubric.py       criteria an answer is judged by, as Python or as a file
scored_rows.py  data files with a scorer named by a word
strict_rows.py  rows of data files as tasks, none lost unseen
tool_schemas.py  which functions a model may call on a task
"""

from envs.base import Env, Message, MultiTurnEnv, Score, SingleTurnEnv, Task, ToolCall

__all__ = ["Env", "Message", "MultiTurnEnv", "Score", "SingleTurnEnv", "Task", "ToolCall"]
