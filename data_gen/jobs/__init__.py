"""Long work: output directories, and steps that survive being killed.

Read `output.py`, then `steps.py`, `runners.py`. The words of `data_gen`:

    job     all that one run of a command has to do; its steps are noted, so that a killed one goes on
    step    a piece of a job that one worker does
    run     some megabytes of one input that wait on the disk, in the order of the input until they are sorted
    part    packs that follow one another in the output, about as large as a run: what is assembled at a time
    shard   a file of the output; of packs, whole parts
    group   entries that belong together by a key, such as the sequences of a run that go into one part
    rank    number of entries of its group before an entry: of a sequence, those of its length, in the
            order of the input
    slot    the place of one sequence in a pack

A run of a command, from its start to its end, is the other meaning of that word.
"""
