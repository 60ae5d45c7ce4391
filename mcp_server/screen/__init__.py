"""How the command line looks: options every command has, tables, live display. Used by `cli`; start
with `terminal.py`.
"""
