"""Hostile trials of fsla, seeded: what breaks must be refused in words, or come out right.

`trials` runs and judges one trial. Each other module makes the trials of one kind. `python -m faults` from the folder
of tests runs all of them, writes their counts as JSON and the table of docs/explanation/reliability.md.
"""
