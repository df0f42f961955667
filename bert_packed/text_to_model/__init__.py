"""From text to a trained, audited model in the form of Hugging Face: `bert-packed train`."""
