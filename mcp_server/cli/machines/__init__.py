"""Commands about other machines.

host_commands.py  `honesmith hosts`: other machines added, made ready, looked at, removed
"""
