"""Long jobs: output directories, and steps that survive a kill.

Read `output.py`, then `steps.py`, `runners.py`. Terms of `data_gen`:

    job     all work of one run of a command; finished steps are noted, so that a killed job can continue
    step    a piece of a job, done by one worker
    run     some megabytes of one input on disk, in input order until they are sorted
    part    consecutive packs of the output, about as large as a run, assembled together
    level   files that sort all sequences by ranges of parts, the finer the higher; the last by single parts
    shard   an output file; of packs, whole parts
    group   entries with the same key, such as the sequences of a run that belong to one part
    rank    number of entries of its group before an entry: of a sequence, those of its length, in input order
    slot    the place of one sequence in a pack

"Run" also means the run of a command, from start to end.
"""
