"""How long work is done and where it lies: files, output directories, steps that survive being killed.

A *run* of a command is cut into *parts*, each done by one worker and noted when done. Read `files.py`, then
`output.py`, `steps.py`, `runners.py`.
"""
