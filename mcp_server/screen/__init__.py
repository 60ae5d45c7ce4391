"""The face of the command line: options every command has, tables, live display. Used by `cli`;
start with `terminal.py`.

    conversation.py  answers as they come, and a conversation in the terminal
    display.py       what the demo shows while it runs
    render.py        replies as tables, blocks of text, sparklines
    plan_tables.py   the runs of a plan, and what merged TOML files say
    shell.py         calls of tools as shell commands
    terminal.py      options every command has; output for people and for programs
    values.py        values in replies as text, tables and blocks of lines
"""
