"""The walls around user code: Landlock, seccomp, namespaces, limits. Standard library alone; start
with `sandbox.py`.
"""
