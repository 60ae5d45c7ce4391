"""Runs on other machines: put there, followed, brought back.

Start with `engine/machine/processes/seam.py`: what any place to run is asked; this machine is one
of them (`engine/machine/processes/local_executor.py`). A run on another machine keeps its row, its
supervisor and its folder here; where the trainer would stand, `attending/attendant.py` looks after
the run over there, which is an ordinary run of a home of ours on that machine. Shared with a run on
this machine: the lease of a device (`Store.lease_next`), the supervisor with its limits, cancel,
resume and continuation, and every file of the run. Not shared: the process that trains is started
by a supervisor over there, and this package carries the files.

    admission.py     whether a run can go there, asked before it is queued
    hosts.py         the other machines: config.toml, and what was learnt of them
    ssh.py           a connection by the user's own ssh program
    far_side.py      what answers at its other end; the standard library alone
    jobs.py          runs over there: called through the far side
    bundle.py        what a run needs over there, each file once
    mirror.py        the run's files brought back; names, links and sizes that are refused
    orders.py        what the other side is told of a run, and how its answers are read
    rented.py        what this home has rented, on the disk before it is
    linked.py        what the executors over one connection have in common
    ssh_executor.py  the seam over one connection

Slurm (`slurm/`) and Ray (`ray/`) have executors of their own, over the same connection and with the
same files; what both have in common, and what their jobs do, is in `cluster/`. Machines that are
rented for a run, through SkyPilot, are in `sky/`: each is one over SSH once it is up.
"""
