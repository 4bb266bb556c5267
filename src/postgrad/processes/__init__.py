"""Child processes with limits, for verifiers, environments and the model's own process.

    channel       messages over a socket pair
    child         starts a child, sends and receives, says how it ended
    program       what the child runs first: its channel, signals, memory; it ends with its parent
    supervisor    the children of one program: start, replace, close; items with deadlines

Children are fresh interpreters, not forks of this process and its threads. Imports no torch.
"""
