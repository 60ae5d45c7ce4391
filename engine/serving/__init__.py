"""Models that answer: deploy, chat, export. Start with `service.py`.

export.py     an adapter or a merged model as files
modelfile.py  what Ollama needs beside a GGUF file
placement.py  the device, the engine and the memory of a deployment
service.py    deploy and chat
"""
