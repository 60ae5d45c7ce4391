"""How the command line looks: options every command has, tables, live display. Used by `cli`; start
with `terminal.py`.

    command_text.py  calls and prose as the commands a person types
    display.py       what the demo shows while it runs
    render.py        replies as tables, blocks of text, sparklines
    terminal.py      options every command has; output for people and for programs
"""
