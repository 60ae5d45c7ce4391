"""Scorers beside those of `envs.rewards`, for answers of one kind each. Each gives a number from 0
to 1 and reads the final answer strictly. Standard library alone, no chance, no clock but a limit.

    instructions.py  constraints on the form of a text: words, sentences, bullets, what it includes
    maths.py         expressions that mean the same
    sql.py           a query, by the rows it gives on a sqlite file
    tool_calls.py    calls of tools, by name and arguments
"""

from envs.scorers.instructions import instruction_results, instructions
from envs.scorers.maths import maths
from envs.scorers.sql import sql
from envs.scorers.tool_calls import tool_calls

__all__ = ["instruction_results", "instructions", "maths", "sql", "tool_calls"]
