"""Routes of the HTTP server beside MCP: files in and out, and what is shared. They pass the same
gate, need the same scopes and are written into the same log.

    transfers.py  an environment as a zip, an export as a tar, sharing
"""
