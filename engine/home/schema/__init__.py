"""Tables and columns of the database, from its first version to this one. `engine/home/database.py`
applies them.

    migrations.py  the list of migrations; a new one goes to its end
"""
