"""An architecture that the package does not have: each token sees its sequence's mean, through a gate."""
