"""Models that answer: deploy, chat, export. Start with `service.py` and `chat.py`.

answer_stream.py  an answer of a deployment, read while it is sampled
chat.py           ask models: a question or a conversation
chat_reply.py     what `chat` replies
chat_request.py   what `chat` is asked, and how long it may take
conversations.py  conversations kept in the home, to go on with
export.py         an adapter or a merged model as files
locate.py         a program that says where a model is served; judges are asked there
messages.py       what a conversation must look like
modelfile.py      what Ollama needs beside a GGUF file
placement.py      the device, the engine and the memory of a deployment
service.py        deploy
starting.py       the process of a deployment, here or for another machine
far/              models served on another machine, reached through a tunnel
"""
