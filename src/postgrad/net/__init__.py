"""HTTP for all servers and clients: who may ask, bodies with limits, starting, asking with retries.

guard.py    host, origin and token of a request
bodies.py   JSON bodies with limits, and errors as values
server.py   sockets, time limits of connections, shutdown
client.py   JSON to a server that may be busy or down

Imports no torch, and of Postgrad only errors.
"""
