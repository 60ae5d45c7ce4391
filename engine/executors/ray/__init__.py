"""Runs as jobs of a Ray cluster, through its Jobs API over HTTP; no package of Ray's on this side.

A run is one job, as engine/executors/cluster has it. Files go through a folder that all nodes share
and that is seen from here, or over SSH at one of them. Nothing secret goes through Ray, which shows
what it is given to everybody who may look at the cluster.

    jobs_api.py     the Jobs API: called, and its answers read
    causes.py       why a job waits, and how one has ended that wrote no last word
    folder_side.py  called where the shared folder is seen: launches put, looked at, taken back
    driver.py       what Ray starts on a node: it stands for the run
    executor.py     the seam over the API and a connection to the folder
"""
