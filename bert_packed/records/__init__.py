"""TFRecords in and out: from bytes to arrays of sequences and of packs, with where each came from.

Read `sequences.py` (what a batch of sequences is), `tfrecords.py`, `read_unpacked.py`, `read_packed.py`, and
`read_causal.py` for causal language modelling. None of it imports TensorFlow: `record_batches.py` takes
records from files, many at once, compares their `checksums.py`, and `example_columns.py` decodes them; only
records in an unusual form go to TensorFlow. `frames.py`, `frame_contents.py`, `examples.py` and
`first_records.py` do the same for one record. `inputs.py` says what files promise, `provenance.py` follows a
pack back.
"""
