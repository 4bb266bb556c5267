"""Agents: programs of the user that call the policy through an OpenAI-compatible endpoint.

    runner.py       runs one program per trajectory; its calls are the turns of rollout/turns.py
    endpoint.py     the HTTP endpoint, with one session per program
    recording.py    the calls of a session as trajectories of tokens
    program.py      starts a program, with a time limit, and reads its reward
    launch.py       the parent process of a program; ends with the run

May import serving, rollout, environments, data, verifiers, problem, config, web and errors.
"""
