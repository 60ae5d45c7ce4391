"""Offers the model as an HTTP service to a command (a program that plays one rollout of a task).
The policy samples what the program asks, and every token is recorded. Start with `play.py`; the
parts about HTTP also serve deployments (engine/worker/serving/).

    anthropic_messages.py  /v1/messages
    asked.py         a question and its answer, whatever the protocol
    batcher.py       questions of many programs, sampled together
    chat_request.py  requests of deployments read strictly, replies in OpenAI's shape
    http_parts.py    who may ask, bodies and streams within limits
    openai_chat.py   /v1/chat/completions as programs use it
    openai_responses.py  /v1/responses
    play.py          the rollouts of a command, several at once
    server.py        one HTTP server for each rollout, with a key of its own
    session.py       one rollout: its requests joined into trajectories
"""
