"""Online half of bert_packed: batches, packed BERT, training step, checkpoints. Keras 3."""
