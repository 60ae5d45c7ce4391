"""Hosts looked after: connected to, made ready, and the runs on them followed to their end.

Start with `attendant.py`. It stands above the executors, which it chooses by the kind of the host.

    places.py      a connection to the place that a run goes to, whatever kind of place it is
    starts.py      when a run would start, asked of a place with a queue of its own
    attendant.py   looks after one run, until it has ended
    failover.py    where a run goes on whose host has failed
    hours.py       how long a run has held its devices over there, for the supervisor here
    pinned.py      what training needs, in the versions of this side
    host_setup.py  our environment built over there, and a host checked
"""
