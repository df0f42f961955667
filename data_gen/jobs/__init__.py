"""How long work is done and where it lies: files, output directories, steps that survive being killed.

Read `files.py`, then `output.py`, `steps.py`, `runners.py`, `workers.py`. What words mean here and in all of
`data_gen`:

    job     all that one run of a command has to do; its steps are noted, so that a killed one goes on
    step    a piece of a job that one worker does
    run     some megabytes of one input that wait on the disk, in the order of the input until they are sorted
    part    packs that follow one another in the output, about as large as a run: what is assembled at a time
    shard   a file of the output; of packs, whole parts
    group   entries that belong together by a key, such as the sequences of a run that go into one part
    rank    how many entries of its group stand before an entry: of a sequence, those of its length, in the
            order of the input
    slot    the place of one sequence in a pack

A command's run, from its start to its end, is the other meaning of that word; it is never cut into anything.
"""
