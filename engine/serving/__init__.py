"""Models that answer: deploy, chat, export. Start with `service.py`.

export.py     an adapter or a merged model as files
placement.py  the device, the engine and the memory of a deployment
service.py    deploy and chat
"""
