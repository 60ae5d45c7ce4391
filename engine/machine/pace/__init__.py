"""How a run that is under way goes on: what its trainer is doing, what is left, whether it hangs.
Everything is read from files of the run, mostly from `heartbeat.json`; the supervisor imports it,
so it is standard library only. Start with `progress.py`.

    forecast.py   what is left of a run: seconds as a band, from its own measured pace
    heartbeat.py  what a trainer is doing, how far it is, and how long its work has taken
    progress.py   how far a run is: all of the above in one record; STATUS.md
    staleness.py  whether a run has been silent for longer than its pace explains
"""
