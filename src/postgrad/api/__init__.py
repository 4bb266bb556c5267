"""The Python API: what `import postgrad` offers. It runs the same code as the command line.

    settings.py     keyword arguments, also objects, become the settings of the command line
    rows.py         data in memory becomes rows and problems
    models.py       a model in memory becomes a model folder
    rewards.py      rewards given as functions, names or lists of them
    request.py      all arguments of train() together become a configuration
    callbacks.py    what a training run calls
    trainer.py      train() and Trainer
    run.py          Run: a run folder as an object
    evaluation.py   evaluate(), generate() and score()
    session.py      Session: sample, forward_backward, optim_step

`import postgrad` loads nothing of this; each name is imported when it is first used.
May import: everything except the command line.
"""
