"""Science: the paper's claims put to the test, and how the bundled model was made.

In: settings of many small trainings; out: their run folders, a table of claims with intervals, figures (`nanoragen.reproduce`).
In: seeds; out: demonstrations of the bundled games and the model that was trained on them (`nanoragen.warmup`).

Read in this order:
    reproduce.py        trains a grid of runs, as many at a time as there are cores
    claims.py           judges the claims from the logs of these runs; statistics.py: rank correlation and intervals
    gradients.py        norms of the task, entropy and KL gradients by in-group reward variance, as a run measures them
    demonstrations.py   what the bundled model has seen: solvers that err, and their reasoning in words
    warmup.py           its tokenizer, its architecture, its training
Results: README.md here.
"""
