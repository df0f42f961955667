"""Losses of packs, with figures and gradients, written plainly in NumPy: what ours must equal.

Everything goes sequence after sequence, in float64, and knows packs only by what their records say. The
gradient of a mean negative log-likelihood by its logits is (softmax - one-hot) / count.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, V vocabulary,
C classes.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Plain:
    """Sums, means and gradients of a step's batch, dicts that are named as ours."""

    sums: dict
    means: dict  # what people read
    gradients: dict  # of the step's loss by the logits


def sequences_of(batch):
    """Rows and slots, counted from 0, of all sequences of a batch."""
    weights = batch["slot_weights"]
    return [(row, slot) for row, slot in np.ndindex(weights.shape) if weights[row, slot]]


def nll_and_gradient(logits, label):
    """Negative log-likelihood of one label, and its gradient by its logits, a vector."""
    logits = np.asarray(logits, np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    return -np.log(shares[label]), shares - np.eye(len(logits))[label]


def pretraining(outputs, batch, mlm_loss):
    """Masked-LM and next-sentence loss of a whole step, however many micro-batches compute it.

    Args:
        outputs: Dict of `mlm_logits` `[B, P, V]` and `nsp_logits` `[B, K, 2]`.
        batch: The whole step's.
        mlm_loss: "per_sequence": each sequence's mean over its predictions, 0 where it has none, and then the
            mean over sequences; "per_token": the mean over all predictions.
    """
    sequences = sequences_of(batch)
    num_sequences, num_predictions = len(sequences), np.count_nonzero(batch["prediction_sequences"])
    gradients = {name: np.zeros(values.shape) for name, values in outputs.items()}
    mlm_losses, mlm_rights, nsp_losses, nsp_rights = [], [], [], []
    for row, slot in sequences:
        places = [p for p, owner in enumerate(batch["prediction_sequences"][row]) if owner == slot + 1]
        losses, rights = [], []
        for place in places:
            label = batch["prediction_ids"][row, place]
            loss, gradient = nll_and_gradient(outputs["mlm_logits"][row, place], label)
            losses.append(loss)
            rights.append(np.argmax(outputs["mlm_logits"][row, place]) == label)
            count = num_sequences * len(places) if mlm_loss == "per_sequence" else num_predictions
            gradients["mlm_logits"][row, place] = gradient / count
        mlm_losses.append(losses)
        mlm_rights.append(rights)
        label = batch["nsp_labels"][row, slot]
        loss, gradient = nll_and_gradient(outputs["nsp_logits"][row, slot], label)
        gradients["nsp_logits"][row, slot] = gradient / num_sequences
        nsp_losses.append(loss)
        nsp_rights.append(np.argmax(outputs["nsp_logits"][row, slot]) == label)
    reduce = np.mean if mlm_loss == "per_sequence" else np.sum
    sums = {
        "mlm_loss": sum(reduce(losses) for losses in mlm_losses if losses),
        "nsp_loss": sum(nsp_losses),
        "mlm_correct": sum(map(sum, mlm_rights)),
        "mlm_sequence_accuracy": sum(np.mean(rights) for rights in mlm_rights if rights),
        "nsp_correct": sum(nsp_rights),
        "num_predictions": num_predictions,
        "num_predicted_sequences": sum(bool(losses) for losses in mlm_losses),
        **_counts(batch),
    }
    all_rights = [right for rights in mlm_rights for right in rights]
    all_losses = [loss for losses in mlm_losses for loss in losses]
    means = {
        "mlm_loss": np.mean([np.mean(losses) if losses else 0.0 for losses in mlm_losses])
        if mlm_loss == "per_sequence"
        else np.mean(all_losses),
        "nsp_loss": np.mean(nsp_losses),
        "mlm_accuracy": np.mean([np.mean(rights) for rights in mlm_rights if rights]),
        "mlm_token_accuracy": np.mean(all_rights),
        "nsp_accuracy": np.mean(nsp_rights),
    }
    return Plain(sums, {**means, "loss": means["mlm_loss"] + means["nsp_loss"]}, gradients)


def masked_lm(outputs, batch, mlm_loss):
    """Masked-LM loss alone; arguments are those of `pretraining`, without `nsp_logits`."""
    slots = batch["slot_weights"].shape
    both = pretraining({**outputs, "nsp_logits": np.zeros((*slots, 2))}, batch, mlm_loss)
    sums, means = (
        {name: value for name, value in part.items() if not name.startswith("nsp")}
        for part in (both.sums, both.means)
    )
    return Plain(sums, {**means, "loss": means["mlm_loss"]}, {"mlm_logits": both.gradients["mlm_logits"]})


def answers(outputs, batch):
    """SQuAD's loss: a sequence's is the mean of its start's and its end's, each among its own tokens.

    `outputs` has `start_logits` and `end_logits` `[B, S]`.
    """
    sequences = sequences_of(batch)
    gradients = {name: np.zeros(values.shape) for name, values in outputs.items()}
    losses, rights = [], {"start": [], "end": []}
    for row, slot in sequences:
        own = np.flatnonzero(batch["sequence_ids"][row] == slot + 1)
        for name, its_rights in rights.items():
            logits = outputs[f"{name}_logits"][row, own]
            label = batch[f"{name}_positions"][row, slot] - own[0]
            loss, gradient = nll_and_gradient(logits, label)
            losses.append(loss / 2)
            its_rights.append(np.argmax(logits) == label)
            gradients[f"{name}_logits"][row, own] = gradient / 2 / len(sequences)
    sums = {"loss": sum(losses), **{f"{name}_correct": sum(found) for name, found in rights.items()}}
    means = {f"{name}_accuracy": np.mean(found) for name, found in rights.items()}
    return _finetuning(sums, means, gradients, batch, len(sequences))


def classes(outputs, batch, weights=None):
    """Classification: the mean over sequences, with `weights` of the classes the weighted mean.

    `outputs` has `logits` `[B, K, C]`.
    """
    sequences = sequences_of(batch)
    gradient = np.zeros(outputs["logits"].shape)
    losses, rights = [], []
    shares = [weights[batch["labels"][place]] if weights else 1 for place in sequences]
    for (row, slot), share in zip(sequences, shares, strict=True):
        logits, label = outputs["logits"][row, slot], batch["labels"][row, slot]
        loss, its_gradient = nll_and_gradient(logits, label)
        losses.append(share * loss)
        rights.append(np.argmax(logits) == label)
        gradient[row, slot] = share * its_gradient / sum(shares)
    sums = {"loss": sum(losses), "correct": sum(rights), **({"num_weighted": sum(shares)} if weights else {})}
    return _finetuning(sums, {"accuracy": np.mean(rights)}, {"logits": gradient}, batch, sum(shares))


def several(outputs, batch):
    """Several labels at once: the mean over sequences and labels. `outputs` has `logits` `[B, K, C]`."""
    sequences = sequences_of(batch)
    gradient = np.zeros(outputs["logits"].shape)
    loss, rights = 0.0, []
    for place in sequences:
        logits, bits = outputs["logits"][place].astype(np.float64), batch["labels"][place]
        chances = 1 / (1 + np.exp(-logits))
        loss -= np.mean(np.log(np.where(bits == 1, chances, 1 - chances)))
        rights.append(((chances > 0.5) == bits).all())
        gradient[place] = (chances - bits) / len(bits) / len(sequences)
    sums = {"loss": loss, "correct": sum(rights)}
    return _finetuning(sums, {"accuracy": np.mean(rights)}, {"logits": gradient}, batch, len(sequences))


def numbers(outputs, batch):
    """Regression: the mean squared error over sequences. `outputs` has `logits` `[B, K, 1]`."""
    sequences = sequences_of(batch)
    gradient = np.zeros(outputs["logits"].shape)
    total = 0.0
    for row, slot in sequences:
        error = float(outputs["logits"][row, slot, 0]) - float(batch["labels"][row, slot])
        total += error**2
        gradient[row, slot, 0] = 2 * error / len(sequences)
    return _finetuning({"loss": total}, {}, {"logits": gradient}, batch, len(sequences))


def tags(outputs, batch, tag_loss="per_sequence"):
    """Tags of tokens. `outputs` has `logits` `[B, S, C]`.

    `tag_loss` "per_sequence" is the mean over a sequence's words, and then over sequences; "per_token" that
    over all words.
    """
    sequences = sequences_of(batch)
    num_words = np.count_nonzero(batch["prediction_sequences"])
    count = len(sequences) if tag_loss == "per_sequence" else num_words
    gradient = np.zeros(outputs["logits"].shape)
    loss, rights = 0.0, []
    for row, slot in sequences:
        places = np.flatnonzero(batch["prediction_sequences"][row] == slot + 1)
        for place in places:
            token, label = batch["prediction_positions"][row, place], batch["prediction_ids"][row, place]
            logits = outputs["logits"][row, token]
            nll, its_gradient = nll_and_gradient(logits, label)
            share = 1 / len(places) if tag_loss == "per_sequence" else 1.0
            loss += nll * share
            rights.append(np.argmax(logits) == label)
            gradient[row, token] += its_gradient * share / count
    sums = {"loss": loss, "correct": sum(rights), "num_predictions": num_words}
    return _finetuning(sums, {"accuracy": np.mean(rights)}, {"logits": gradient}, batch, count)


def next_tokens(outputs, batch, weighting="per_token"):
    """Next tokens. `outputs` has `logits` `[B, S, V]`; `weighting` is as `mlm_loss` of `pretraining`."""
    sequences = sequences_of(batch)
    num_predictions = np.count_nonzero(batch["label_sequences"])
    gradient = np.zeros(outputs["logits"].shape)
    losses, rights, num_bytes = [], [], 0
    for row, slot in sequences:
        places = np.flatnonzero(batch["label_sequences"][row] == slot + 1)
        losses.append([])
        for place in places:
            logits, label = outputs["logits"][row, place], batch["label_ids"][row, place]
            loss, its_gradient = nll_and_gradient(logits, label)
            losses[-1].append(loss)
            rights.append(np.argmax(logits) == label)
            count = num_predictions if weighting == "per_token" else len(places) * len(sequences)
            gradient[row, place] = its_gradient / count
        num_bytes += batch["sequence_bytes"][row, slot]
    nll, own_means = sum(map(sum, losses)), [np.mean(one) for one in losses if one]
    sums = {
        "lm_loss": nll if weighting == "per_token" else sum(own_means),
        "lm_nll": nll,
        "lm_sequence_nll": sum(own_means),
        "lm_correct": sum(rights),
        "num_predictions": len(rights),
        "num_predicted_sequences": len(own_means),
        "num_bytes": num_bytes,
        **_counts(batch),
    }
    loss = nll / len(rights) if weighting == "per_token" else sum(own_means) / len(sequences)
    means = {
        "lm_loss": loss,
        "loss": loss,
        "lm_accuracy": np.mean(rights),
        "perplexity": np.exp(nll / len(rights)),
        "sequence_perplexity": np.exp(np.mean(own_means)),
        "byte_perplexity": np.exp(nll / num_bytes),
    }
    return Plain(sums, means, {"logits": gradient})


def _finetuning(sums, means, gradients, batch, divisor):
    return Plain({**sums, **_counts(batch)}, {**means, "loss": sums["loss"] / divisor}, gradients)


def _counts(batch):
    return {
        "num_sequences": len(sequences_of(batch)),
        "num_tokens": np.count_nonzero(batch["sequence_ids"]),
        "num_pairs": count_pairs(batch["sequence_ids"]),
    }


def count_pairs(sequence_ids):
    """Pairs of tokens of one sequence, of all packs."""
    return sum(one == other != 0 for row in sequence_ids for one in row for other in row)
