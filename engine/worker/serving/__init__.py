"""The OpenAI-compatible server and the models behind it; merging an adapter. Started as processes;
start with `openai_server.py`.
"""
