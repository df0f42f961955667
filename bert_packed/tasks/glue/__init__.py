"""Classes and numbers of texts and pairs: GLUE."""
