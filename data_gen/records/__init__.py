"""TFRecords in and out: from bytes to arrays of sequences and of packs, with where each came from.

Read `sequences.py` (what a batch of sequences is), `tfrecords.py`, `read_unpacked.py`, `read_packed.py`, and
`read_causal.py` for causal language modelling; `inputs.py` says what files promise, `provenance.py` follows a
pack back.
"""
