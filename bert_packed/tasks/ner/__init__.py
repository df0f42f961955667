"""Tags of words, such as named entities, in CoNLL's form."""
