"""The engine: everything a run needs, without the protocol. Start at `runs/submit/training.py`
for how a run begins and at `supervisor.py` for how it goes on; nobody imports `worker`.

    doctor.py      what is wrong with this machine
    supervisor.py  one per living run: caps, cancel, exit record
"""
