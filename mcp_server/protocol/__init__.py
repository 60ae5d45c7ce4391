"""The server over MCP: tools, resources, prompts, tasks, over stdio and HTTP. Start with `app.py`,
then `guard.py`.
"""
