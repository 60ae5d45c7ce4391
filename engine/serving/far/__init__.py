"""Models served on another machine, as if they were served here. Start with `forwarder.py`.

control.py    what calls of this home ask of the forwarder
forwarder.py  the process here: sends the model, has it served there, keeps the tunnel open
host_side.py  what is called on the other machine
tunnel.py     a port here that leads to a port there, through ssh
"""
