"""This machine: its processes, the virtual environments on it, which faster ways to compute work on
it, and how far its runs are. Other machines are `engine/executors`. Start with
`processes/launcher.py`.

`fast_paths/` may use the other three; `install/` and `processes/` do not know each other, and
`processes/` reads from `pace/` how far a run is.
"""
