"""Settings of a model, a file for each architecture; `bert_packed.config` is their table."""
