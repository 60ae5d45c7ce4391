"""Programs that play one rollout of a foreign environment and ask the model over HTTP, run as the
command of an environment (envs/host/program.py) by the interpreter of its own packages.

    synth_rollout.py   one `/rollout` of a task app
"""
