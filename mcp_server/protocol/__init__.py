"""The server over MCP: tools, resources, prompts, tasks, over stdio and HTTP. Start with `app.py`,
then `guard.py`.

    agreement.py     a person agrees to a spend above the home's limit
    app.py           the server over one home: tools, resources, prompts, tasks
    arguments.py     unknown arguments and wrong values of a call, and how to correct them
    guard.py         the one place a call passes on its way in and out: scopes, arguments, errors,
                     sizes
    http_app.py      streamable HTTP behind a gate: bearer token, Host, Origin, sizes, rates
    parent_watch.py  the server ends when the agent that started it is gone
    prompts.py       three ways a person starts the work
    resources.py     playbook, runs, environments, hardware, settings to read
    routes/          files in and out, and sharing, beside MCP
    stdio.py         lines over stdio that are not messages, mended or refused
    tasks.py         a wait as a task, for clients that declare tasks
    threads.py       calls that block: progress, and an end when the client cancels
    tools.py         the tools: arguments, descriptions, bounds
"""
