"""`honesmith key` and `honesmith share`: who may call the server, what they may use and see. Start
with `key_commands.py`.

    key_commands.py    keys and projects: made, listed with what they spent, given a new token
    share_commands.py  what a key sees of others, and the priority of a run
"""
