"""Means from the sums of `losses.py`: the one division that ends a step, a log interval or an evaluation."""

SUM_NAMES = (
    "mlm_loss",
    "nsp_loss",
    "mlm_correct",
    "mlm_sequence_accuracy",
    "nsp_correct",
    "num_predictions",
    "num_predicted_sequences",
    "num_sequences",
    "num_tokens",
)


def add_sums(total, sums):
    """Add one step's sums to a running total (both dicts of floats; an empty total is zero)."""
    return {name: total.get(name, 0.0) + float(value) for name, value in sums.items()}


def means(sums, mlm_loss):
    """The figures that people read.

    Args:
        sums: Dict of floats, summed over any number of batches.
        mlm_loss: "per_sequence" or "per_token": the denominator of the masked-LM loss.

    Returns:
        Dict: `loss` (masked-LM plus next-sentence), `mlm_loss`, `nsp_loss`, `mlm_accuracy` (mean over
        sequences that have a prediction), `mlm_token_accuracy` (mean over predictions), `nsp_accuracy`.
        A mean over nothing is 0.
    """
    mlm_count = sums["num_sequences"] if mlm_loss == "per_sequence" else sums["num_predictions"]
    mlm = _ratio(sums["mlm_loss"], mlm_count)
    nsp = _ratio(sums["nsp_loss"], sums["num_sequences"])
    return {
        "loss": mlm + nsp,
        "mlm_loss": mlm,
        "nsp_loss": nsp,
        "mlm_accuracy": _ratio(sums["mlm_sequence_accuracy"], sums["num_predicted_sequences"]),
        "mlm_token_accuracy": _ratio(sums["mlm_correct"], sums["num_predictions"]),
        "nsp_accuracy": _ratio(sums["nsp_correct"], sums["num_sequences"]),
    }


def _ratio(total, count):
    return total / count if count else 0.0
