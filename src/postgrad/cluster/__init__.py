"""Where models live: in this process or in a child process, behind the same ports. Methods cannot tell.

May touch methods, rollout, model and below; the driver asks it for ports.
"""
