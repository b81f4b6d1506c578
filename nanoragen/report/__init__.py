"""The report: one HTML page of a run, or of several side by side, that needs no network.

In: a run folder (its logs only; no model, no torch). Out: report.html or compare.html, or one picture.

Read in this order:
    runs.py       a run folder read back, torn lines and all
    verdict.py    what is said of a run, and of several
    charts.py     what is drawn, by matplotlib
    episodes.py   which episodes are shown, and how
    page.py       the page; `python -m nanoragen.report`
"""
