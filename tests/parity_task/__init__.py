"""A fine-tuning task that the package does not have: whether a text has an odd number of words."""
