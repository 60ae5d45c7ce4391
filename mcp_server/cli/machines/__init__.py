"""Commands about other machines.

host_commands.py  `honesmith hosts`: machines over SSH added, made ready, looked at, removed
"""
