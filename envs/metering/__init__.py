"""What user code takes beyond its time, counted where it is taken; and what is asked over HTTP for
it outside its box. Knows nothing of the rest.

judge_calls.py    what judge calls took, and how many more a run allows
relay.py          models behind a URL, asked by name out of the box of user code
reward_server.py  a server that says what a rollout of a command earned
"""
