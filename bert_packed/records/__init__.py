"""TFRecords in and out: bytes, sequences, packs, and what the files beside them promise.

`tfrecords.py` reads and writes files, `examples.py` decodes records, `sequences.py` holds many of them in
columns. `read_bert.py` and `read_causal.py` go from file to sequences.
"""
