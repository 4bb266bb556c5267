"""A file becomes located rows, and a row becomes a Problem.

    columns.py    the names: aliases, columns of context, media
    shapes.py     the shapes, the choice of one by the names of the columns, and what was read
    fields.py     how a row of each shape becomes the fields of a Problem
    messages.py   conversations, tools and tool calls
    choices.py    multiple-choice questions
    values.py     checked access to one column

The names of the columns decide the shape, once per file; values never do. What no shape reads goes
to `problem.extra`, where verifiers find it. Anything else is renamed (FILE:OLD=NEW), prepared
(postgrad data prepare), or written as a function (file.py:load).
"""
