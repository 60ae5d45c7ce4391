"""Runs as jobs of a cluster, whatever gives them a node: what lies where, and what the job does.

Each launch of a run has a folder of its own on a file system that all nodes share: what another
launch left there cannot be written into it. Whoever put the job there and the job itself speak
through files of that folder alone; the database of a launch is opened by its job and nobody else.

    place.py      the folder of a launch, and what lies in it
    launches.py   that folder handled by whoever puts the job there
    executor.py   what the executors of all clusters have in common
    ends.py       how a run ended whose job wrote no last word
    node_side.py  the job: an ordinary run of ours on a node
"""
