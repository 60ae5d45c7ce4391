"""Runs an environment in a process of its own and talks to it over a pipe. The engine uses
`process.py`; `sandbox_parent.py` and `child.py` run on the other side of the pipe.

    child.py           what runs in the env process
    command.py         the client of a command, a program that plays one task by itself
    installer.py       pip in the sandbox, for one environment's packages
    judge_budget.py    how many judge calls, and how much money for them, a run may use
    launch.py          the settings with which the parent of user code starts
    loader.py          makes an Env of a folder; errors have file and line
    pipe.py            lines over the pipe to an env process
    process.py         the client of an env process
    program.py         the sandbox side of a command: its gateway, its folder, its reward file
    replies.py         checks the replies of an env process
    redact.py          replaces secrets in text; the engine's home/sanitize.py uses it too
    sandbox_parent.py  the parent of user code: confines it, and kills all of it at the end
"""
