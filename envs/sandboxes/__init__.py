"""Sandboxes in which an agent's commands run: the rollout's own box, a container, or one rented at
a cloud. Used by the program of a rollout, in the environment's own process; the packages of the
clouds are those of the environment, imported by name. Start with `opening.py`.

    contract.py  what the providers share: the order, the result, the fault
    daytona.py   a sandbox of Daytona, through its package
    docker.py    a container, through the command line of docker or podman
    e2b.py       a sandbox of E2B, through its package
    local.py     the rollout's own box: a second box around each command
    opening.py   chooses the provider, checks it before a push, tries again where it is busy
    remote.py    a sandbox that is reached by a shell: output cut, files read, processes ended
    runner.py    confines itself and becomes one command of the local provider
"""
