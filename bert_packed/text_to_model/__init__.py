"""`bert-packed train`: the way from text to a trained, audited model in the form of Hugging Face."""
