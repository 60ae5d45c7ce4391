"""What is installed: virtual environments for training and for vLLM. Used by whoever starts a
process; start with `venvs.py`.

    setup_env.py  the training environment of a light install
    venvs.py      what building a virtual environment takes: alone, room, proof, place
    vllm_env.py   vLLM's own environment: built, located
    env_packages.py   virtual environments for requirements.txt
    pip_index.py      where pip looks for packages on this machine
"""
