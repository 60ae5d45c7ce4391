"""What a home needs to serve a team: whose things are whose, and whose queued run starts next. Used
by engine/home alone; start with `tables.py`.

    fair_queue.py  the order of the queue: by what owners used lately, priorities and waiting
    tables.py      tables and columns of owners and shares, and the SQL of what a viewer sees
"""
