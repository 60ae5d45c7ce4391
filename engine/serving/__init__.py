"""Models that answer: deploy, chat, export. Start with `service.py`.

export.py   an adapter or a merged model as files
service.py  deploy and chat
"""
