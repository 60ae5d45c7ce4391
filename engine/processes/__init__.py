"""Processes that outlive a call: started, alive or not, how they ended. Runs and deployments stand
on it; start with `launcher.py`.
"""
