"""An environment in a process of its own: loaded, asked over a pipe, ended. The engine's door is
`process.py`; `sandbox_parent.py` and `child.py` run inside that process.
"""
