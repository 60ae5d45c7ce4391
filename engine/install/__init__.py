"""What is installed: virtual environments for training and for vLLM. Used by whoever starts a
process; start with `venvs.py`.
"""
