"""Science: the paper's claims put to the test, and how the bundled model was made.

In: run folders of many small trainings. Out: tables with intervals, figures, the bundled model.

Read in this order:
    reproduce.py        trains the grid of runs; claims.py judges the paper's claims from their logs
    gradients.py        norms of the task, entropy and KL gradients by in-group reward variance, as a run measures them
    statistics.py       rank correlation and intervals of few numbers
    demonstrations.py   what the bundled model was shown; warmup.py trains it on that
"""
