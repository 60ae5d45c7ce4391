"""The engine: everything a run needs, without the protocol. Start at `runs/submit.py` for how a run
begins and at `supervisor.py` for how it goes on; nobody imports `worker`.
"""
