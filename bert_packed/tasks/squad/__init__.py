"""Questions on texts: SQuAD 1.1 and 2.0."""
