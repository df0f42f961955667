"""Training of vectors that compare."""
