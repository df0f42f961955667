"""TFRecords in and out: from bytes to arrays of sequences and of packs, with where each came from.

Read `sequences.py` (what a batch of sequences is), `tfrecords.py`, `read_unpacked.py`, `read_packed.py`, and
`read_causal.py` for causal language modelling; `frames.py`, `frame_contents.py`, `examples.py` and
`first_records.py` read files without TensorFlow; `inputs.py` says what files promise, `provenance.py` follows
a pack back.
"""
