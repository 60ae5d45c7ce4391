"""The walls around user code: Landlock, seccomp, namespaces, limits. Standard library alone; start
with `sandbox.py`.

    confine.py     limits, another uid, no network
    descendants.py  every process that was started here, killed to the last
    inner_box.py   the second box, around code or commands a model wrote
    kernel.py      calls the standard library does not have, and every option of prctl
    landlock.py    which files may be reached
    namespaces.py  own processes, network and mounts, by ourselves or bubblewrap
    packages.py    what user code may import, put on its path once it is confined
    sandbox.py     the layers around user code, and the self-test that says which hold
    seccomp.py     which system calls are refused
    syscalls.py    their numbers, on each machine
"""
