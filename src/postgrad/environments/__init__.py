"""Environments: what answers a policy between the turns of a response, and tools that it calls.

    port.py         the protocol of an environment; what it returns, as plain values
    lookup.py       from the settings to environments: which class, for which problem
    session.py      one trajectory's environment and tools
    host.py         runs sessions in threads, with time limits
    pool.py         runs sessions in child processes; replays those of a process that died
    child.py        the main program of such a process
    remote.py       environments behind a server: the client of OpenEnv's wire
    tools.py        functions that the policy calls, shown to it as schemas
    mcp_tools.py    the tools of MCP servers
    calls.py        the formats in which models write calls

May import verifiers, sandbox, processes, problem, config, user_code and errors. Imports no torch,
so that child processes start fast.
"""
