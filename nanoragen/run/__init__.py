"""Everything about a run that is not learning: settings, records, checkpoints, and how it ends. No mathematics here.

In: command-line arguments and, step by step, numbers and episodes. Out: the run folder, console lines, exit statuses.

Read in this order:
    cli.py           a dataclass becomes command-line flags; settings.py checks their values and claims the run folder
    metrics.py       the log files, and what the console says
    checkpoint.py    save, verify, and resume exactly
    stops.py         signals and early stops; faults.py: environments that fail; memory.py: what a step will need
    distributed.py   several processes under torchrun
"""
