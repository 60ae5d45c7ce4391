"""Runs as jobs of a Slurm cluster, through its own commands.

Start with `login_side.py`. The job and its folder are those of any cluster
(engine/executors/cluster).

    commands.py    sbatch, squeue, sacct, scancel: called, and their answers read
    causes.py      why a job waits, and how one has ended that wrote no last word
    login_side.py  called over a connection to the login node: jobs submitted, looked at, ended
    executor.py    the seam over one connection to the login node
"""
