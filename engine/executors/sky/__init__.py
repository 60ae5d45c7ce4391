"""Machines that are rented for a run, through a SkyPilot API server.

Each launch of a run is a cluster of its own, of one machine, named after home, run and launch. The
server rents it and gives it back; inside it a run is what it is on any machine over SSH. Nothing of
SkyPilot is imported: its server is asked over HTTP.

    api.py        the server's calls, and its answers read
    pickled.py    what of an answer is a pickle, read without running any of it
    offers.py     what a cluster would cost, held against the limits of the host
    task.py       what a cluster is asked to be
    node_side.py  its one job: the dead man's switch; sent as text, the standard library alone
    access.py     the way into a cluster: our own key, and its host key from the job's log
    late_link.py  a connection to a machine that is not up yet
    tunnel.py     carries one to a pod of Kubernetes, through the server
    executor.py   the seam
"""
