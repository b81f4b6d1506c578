"""Everything about a run that is not learning: settings, records, checkpoints, and how it ends. No mathematics here.

In: command-line arguments and, step by step, numbers and episodes. Out: the run folder, console lines, exit statuses.

Read in this order:
    cli.py           a dataclass becomes command-line flags; settings.py checks their values, folder.py claims the run folder
    session.py       what surrounds the steps of train.py: bar, files, evaluations, checkpoints, the end
    log.py           the log files; records.py reads them; metrics.py: figures of episodes; console.py, regimes.py: words
    checkpoint.py    save, verify, and resume exactly; provenance.py: which code ran when; files.py: whole files or none
    signals.py       a run is asked to end; stops.py: early stops; errors.py: those that a setting cures
    faults.py        environments that fail; memory.py: what a step will need; distributed.py: several processes
"""
