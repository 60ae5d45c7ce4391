"""An environment in a process of its own: loaded, asked over a pipe, ended. The engine's door is
`process.py`; `sandbox_parent.py` and `child.py` run inside that process.

    child.py           what runs in the env process
    command.py         the client of a command, which plays one task by itself
    installer.py       pip in the box, for one environment's packages
    judge_budget.py    what the judge calls of a run may take together
    launch.py          what the parent of user code is told when it starts
    loader.py          a folder to an Env; what is wrong, with file and line
    pipe.py            lines over the pipe to an env process
    process.py         the client of an env process
    program.py         what surrounds a command in its box: its gateway, its folder, its reward
    replies.py         what an env process replies, checked
    redact.py          secrets taken out of text; the engine's home/sanitize.py uses it too
    sandbox_parent.py  the parent of user code: limits before, nothing left after
"""
