"""Installation of virtual environments: for training, for vLLM, and for an environment's packages.
Used by whatever starts a process; start with `venvs.py`.

    setup_env.py  the training environment of a light install
    venvs.py      the steps they share: one builder at a time, disk space, a proof, the final place
    vllm_env.py   vLLM's own environment: built, located
    env_packages.py   virtual environments for requirements.txt
    pip_index.py      where pip looks for packages on this machine
"""
