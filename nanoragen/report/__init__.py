"""The report: one HTML page of a run, or of several side by side, that needs no network.

In: a run folder (its logs only; no model, no mathematics). Out: report.html or compare.html.

Read in this order:
    runs.py     a run folder read back, torn lines and all
    charts.py   what is drawn and said of it
    page.py     the page; `python -m nanoragen.report`
"""
