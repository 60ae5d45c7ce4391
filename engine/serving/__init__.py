"""Models that answer: deploy, chat, export. Start with `service.py`."""
