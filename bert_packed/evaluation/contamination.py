"""Checks that packing is invisible: no sequence of a pack affects another, and all train as if alone.

Neighbours: a change of one sequence must leave all others exactly as they are, and the gradient of its
outputs and losses by their embeddings must be exactly 0. Unpacked: outputs, losses, accuracies and gradients
equal those of one sequence a row, up to rounding.

Rows of `--split_sequences`: a sequence goes on in the next pack of its row, and in no other. The packs are
taken as training takes them, step after step and in micro-batches, each with the states that the pack before
it in its row has left. Two rows, two steps:

    pack 0, row 0    [a a a b]            pack 2, row 0    [b b . .]     takes over from pack 0
    pack 1, row 1    [c c c c]            pack 3, row 1    [d d d .]     begins with a sequence

Legend: B packs per batch, R sequences or rows, N steps, S pack length, D model width, P predictions per pack,
K sequences per pack.
"""

import functools

import numpy as np
from keras import ops

from bert_packed.core.settings import InputError
from bert_packed.evaluation.model_audit import Check, check_gradients, halves, largest_of
from bert_packed.objectives.features import OWNERS, RECORDED
from bert_packed.training.backend import compiled, gradient

KEY_BIAS_TOLERANCE = 1e-6  # their true gradient is 0, so there is no largest one to compare with
# A share of the model's largest gradient. Smaller gradients are what remains of larger values that cancel,
# and are rounded as these: while attention is uniform, queries and keys have 1e-7 of it
LEAST_SHARE = 1e-5
HIDDEN, VECTORS = "hidden_states", "vectors"  # compared as the outputs of the objective are


def audit(engine, batch, tolerance=1e-5):
    """Run every check on a batch of packs, at least one of several sequences: list of `Check`."""
    objective, model = engine.objective, engine.model
    # Rows without sequences have nothing to compare
    used_rows = np.flatnonzero(np.asarray(batch["slot_weights"]).any(axis=1))
    packs = {feature.name: np.asarray(batch[feature.name])[used_rows] for feature in objective.features}
    unpacked, slots = unpack_batch(packs, len(used_rows), objective.features)
    outputs = {HIDDEN: "S", **objective.outputs, **({VECTORS: "K"} if objective.vectors else {})}
    forward = compiled(functools.partial(_forward, model, objective), model)
    cross_gradient = compiled(functools.partial(_cross_gradient, model, objective), model)
    gradients = compiled(functools.partial(engine.gradients, training=False), model)

    def own_gradient(half_BK):
        mine_BS = _of_half(packs["sequence_ids"], half_BK)
        found_BSD = _to_numpy(cross_gradient(packs, mine_BS, _only(packs, half_BK)))
        return mine_BS, np.abs(found_BSD).max(axis=-1)

    return [
        *_neighbours_outputs(forward, outputs, model.config.vocab_size, packs),
        *check_gradients(map(own_gradient, _halves(packs))),
        *_outputs_alone(forward, outputs, packs, unpacked, slots, tolerance),
        *_training_alone(gradients, model, objective, packs, unpacked, tolerance),
    ]


def unpack_batch(batch, multiple=1, features=RECORDED):
    """Unpack a batch by a plain loop: the same arrays of R rows, and each sequence's row and slot 1..K.

        token_ids     [[a b c d e 0]]   ->   [[a b 0 0 0 0]   [[c d e 0 0 0]
        sequence_ids  [[1 1 2 2 2 0]]         [1 1 0 0 0 0]]   [1 1 1 0 0 0]]

    Positions are counted again and [CLS] is the first token, so that wrong ones of the pack show as a
    difference. Empty rows follow until `multiple` divides R.
    """
    batch = {feature.name: np.asarray(batch[feature.name]) for feature in features}
    slots = [
        (row, int(slot))
        for row in range(len(batch["slot_weights"]))
        for slot in np.flatnonzero(batch["slot_weights"][row]) + 1
    ]
    owners = {kind: batch[name] for kind, name in OWNERS.items() if name in batch}
    num_rows = -(-len(slots) // multiple) * multiple
    result = {name: np.zeros((num_rows, *values.shape[1:]), values.dtype) for name, values in batch.items()}
    for new, (row, slot) in enumerate(slots):
        mine = {kind: np.flatnonzero(owner[row] == slot) for kind, owner in owners.items()}
        mine["K"] = np.array([slot - 1])
        first = mine["S"][0] if len(mine["S"]) else 0
        for feature in features:
            values = batch[feature.name][row, mine[feature.length]]
            if feature.is_slot:
                values = values > 0
            result[feature.name][new, : len(values)] = values - first if feature.is_position else values
        result["position_ids"][new, : len(mine["S"])] = np.arange(len(mine["S"]))
        if "cls_positions" in batch:
            result["cls_positions"][new] = 0
    return result, np.array(slots)


def num_neighbours(batch):
    """Number of packs of a batch that hold more than one sequence."""
    return int(np.sum(np.sum(np.asarray(batch["slot_weights"]) > 0, axis=1) > 1))


def _forward(model, objective, batch):
    hidden_BSD = model.encode(batch, training=False)
    outputs = model.apply_heads(hidden_BSD, batch, training=False)
    vectors = {VECTORS: objective.vectors(outputs, batch)} if objective.vectors else {}
    return {HIDDEN: hidden_BSD, **outputs, **vectors}


def _halves(batch):
    """Halves of the sequences of all packs, bool `[B, K]`."""
    is_used_BK = batch["slot_weights"] > 0
    return halves(np.cumsum(is_used_BK).reshape(is_used_BK.shape) * is_used_BK)


def _of_half(owners, half_BK):
    """True where the sequence 1..K of each token, prediction or slot is of the half; 0 is of none."""
    padded = np.pad(half_BK, ((0, 0), (1, 0)))
    return np.take_along_axis(padded, owners.astype(np.int64), axis=1)


def _only(packs, half_BK):
    """Packs in which a half of the sequences alone counts in a loss; `sequence_ids` are unchanged."""
    found = {**packs, "slot_weights": packs["slot_weights"] * half_BK}
    if OWNERS["P"] in packs:
        sequences_BP = packs[OWNERS["P"]]
        found[OWNERS["P"]] = sequences_BP * _of_half(sequences_BP, half_BK)
    return found


def _cross_gradient(model, objective, batch, mine_BS, counted):
    """Gradient `[B, S, D]`, by all embeddings, of the states of `mine_BS` and what is `counted` of losses."""

    def target(embedded_BSD):
        hidden_BSD = model.encode_embedded(embedded_BSD, batch)
        # The sum is weighted, since layer norm makes a plain sum of outputs constant
        weights_D = ops.linspace(-1.0, 1.0, hidden_BSD.shape[-1])
        is_mine_BS1 = ops.cast(mine_BS, "float32")[..., None]
        states = ops.sum(ops.cast(hidden_BSD, "float32") * weights_D * is_mine_BS1)
        outputs = model.apply_heads(hidden_BSD, batch, training=False)
        if objective.vectors:  # their loss compares sequences, so that each has a gradient on the others
            vectors_BKD = objective.vectors(outputs, batch) * weights_D
            # An unused slot may have the vector of any token
            return states + ops.sum(ops.where(counted["slot_weights"][..., None] > 0, vectors_BKD, 0.0))
        sums = objective.sums(outputs, counted)
        return states + sum(sums[name] for name in objective.losses)

    return gradient(target)(model.embed(batch))


def _owners(batch, kind):
    """int `[B, S | P | K]`: the sequence 1..K of each token, prediction or slot, 0 where unused."""
    if kind in OWNERS:
        return batch[OWNERS[kind]].astype(np.int32)
    weights_BK = batch["slot_weights"]
    return np.where(weights_BK > 0, np.arange(1, weights_BK.shape[1] + 1), 0)


def _neighbours_outputs(forward, outputs, vocab_size, packs):
    """Change every token of half of the sequences; compare all others."""
    before = _to_numpy(forward(packs))
    largest = dict.fromkeys(outputs, 0.0)
    unmoved_BS = np.zeros(packs["sequence_ids"].shape, bool)
    for half_BK in _halves(packs):
        mine_BS = _of_half(packs["sequence_ids"], half_BK)
        tokens = np.where(mine_BS, (packs["token_ids"] + 1) % vocab_size, packs["token_ids"])
        after = _to_numpy(forward({**packs, "token_ids": tokens}))
        for name, kind in outputs.items():
            owners = _owners(packs, kind)
            # Padding must not move, either
            others = ~_of_half(owners, half_BK) & ((owners > 0) | (kind == "S"))
            change = np.abs(after[name] - before[name])[others].max(initial=0.0)
            largest[name] = largest_of(largest[name], change)
        unmoved_BS |= mine_BS & ~(after[HIDDEN] != before[HIDDEN]).any(axis=-1)
    return [
        *(Check(f"neighbors: change of {name}", largest[name], 0.0) for name in outputs),
        # A model that ignores its input would pass everything above
        Check("changed tokens whose own state stays", float(unmoved_BS.sum()), 0.0),
    ]


def _outputs_alone(forward, outputs, packs, unpacked, slots, tolerance):
    """Compare every sequence's outputs with those that it has alone in a row."""
    together, alone = _to_numpy(forward(packs)), _forward_in_parts(forward, unpacked, len(packs["token_ids"]))
    checks = []
    for name, kind in outputs.items():
        here, there = _owners(packs, kind), _owners(unpacked, kind)
        largest, scale = 0.0, 0.0
        for new, (row, slot) in enumerate(slots):
            one, other = together[name][row][here[row] == slot], alone[name][new][there[new] == 1]
            largest = largest_of(largest, np.abs(one - other).max(initial=0.0))
            scale = largest_of(scale, np.abs(other).max(initial=0.0))
        checks.append(Check(f"unpacked: {name}", largest / (scale or 1.0), tolerance))
    return checks


def _training_alone(gradients, model, objective, packs, unpacked, tolerance):
    together, sums = gradients(packs)
    alone, alone_sums = gradients(unpacked)
    got, want = (objective.means({n: float(v) for n, v in s.items()}) for s in (sums, alone_sums))
    checks = [
        Check(f"unpacked: {n}", abs(got[n] - want[n]) / max(abs(want[n]), 1e-9), tolerance) for n in want
    ]
    paths = [variable.path for variable in model.trainable_variables]
    return [*checks, *compare_gradients(paths, together, alone, tolerance)]


def compare_gradients(paths, together, alone, tolerance):
    """Compare gradients of weights, packed and unpacked: list of `Check`.

    A difference is relative to the tensor's largest gradient, but at least to `LEAST_SHARE` of the model's
    largest.
    """
    largest_of_model = max(np.abs(np.asarray(values)).max() for values in alone)
    largest = key_biases = 0.0
    for path, one, other in zip(paths, together, alone, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if path.endswith("key/bias"):
            key_biases = largest_of(key_biases, np.abs(one).max())
        else:
            scale = max(np.abs(other).max(), LEAST_SHARE * largest_of_model) or 1.0
            largest = largest_of(largest, np.abs(one - other).max() / scale)
    return [
        Check("unpacked: gradients of all weights", float(largest), tolerance),
        Check("gradients of key biases, truly 0", float(key_biases), KEY_BIAS_TOLERANCE),
    ]


def _forward_in_parts(forward, batch, size):
    # The compiled function has one number of rows
    parts = [
        _to_numpy(forward({name: values[start : start + size] for name, values in batch.items()}))
        for start in range(0, len(batch["token_ids"]), size)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _to_numpy(outputs):
    if isinstance(outputs, dict):
        return {name: _to_numpy(values) for name, values in outputs.items()}
    return np.asarray(ops.convert_to_numpy(outputs), np.float32)


def take_rows(batch, num_rows):
    """The arrays of packs of rows that a Mamba reads, int32 `[N, R, S]`, by name.

    Refuses packs in which no sequence goes on, or one goes on from another place than its row has reached.
    """
    used = np.flatnonzero((np.asarray(batch["slot_weights"]) > 0).any(axis=1))
    # The last packs of some rows are padding
    num_steps = min(-(-(used.max(initial=-1) + 1) // num_rows), len(batch["slot_weights"]) // num_rows)
    packs = {
        name: np.asarray(batch[name])[: num_steps * num_rows].reshape(num_steps, num_rows, -1)
        for name in ("token_ids", "sequence_ids", "position_ids")
    }
    positions_NRS = packs["position_ids"]
    first_NR, last_NR = positions_NRS[:, :, 0], positions_NRS[:, :, -1]
    expected_NR = np.vstack([np.zeros_like(first_NR[:1]), last_NR[:-1] + 1])
    wrong = np.argwhere((first_NR > 0) & (first_NR != expected_NR))
    if len(wrong):
        step, row = wrong[0]
        raise InputError(
            "`input_file` must be the packs of one --split_sequences, from the first on. Received: pack "
            f"{step * num_rows + row}, which goes on at position {first_NR[step, row]}, not "
            f"{expected_NR[step, row]}."
        )
    if not (first_NR > 0).any():
        raise InputError(
            f"`num_packs` must be at least {2 * num_rows} for packs of {num_rows} rows, and reach a pack in "
            f"which a sequence goes on. Received: {num_steps * num_rows} packs without."
        )
    return packs


def audit_rows(model, packs, tolerance=1e-5):
    """Run every check on packs of `take_rows`: list of `Check`; what the model carries is overwritten."""
    step = compiled(functools.partial(_row_step, model), model)
    run = functools.partial(_run_rows, model, step)
    vocab_size = model.config.vocab_size
    before_NRSD = run(packs)

    def changed_by(is_changed_NRS):
        """True for each token whose state is changed by a bit when other tokens are."""
        other_NRS = np.where(is_changed_NRS, (packs["token_ids"] + 1) % vocab_size, packs["token_ids"])
        return run({**packs, "token_ids": other_NRS}) != before_NRSD

    num_leaks = sum(int(changed_by(one)[~one].any(axis=-1).sum()) for one in _row_changes(packs))
    goes_on_NR = packs["position_ids"][:, :, 0] > 0
    num_without = 0
    for parity in (0, 1):
        is_step_N = np.arange(len(goes_on_NR)) % 2 == parity
        moved_NR = changed_by(np.broadcast_to(is_step_N[:, None, None], packs["token_ids"].shape))[:, :, 0]
        num_without += int((goes_on_NR & ~is_step_N[:, None] & ~moved_NR.any(axis=-1)).sum())
    encode = compiled(lambda batch: model.encode(batch, training=False), model)
    whole_NRSD = _uncut_rows(encode, packs)
    largest = np.abs(before_NRSD - whole_NRSD).max() / (np.abs(whole_NRSD).max() or 1.0)
    return [
        Check("carried states: tokens that another sequence changes", float(num_leaks), 0.0),
        Check("carried states: packs that go on from nothing", float(num_without), 0.0),
        Check("carried states: hidden_states of uncut rows", float(largest), tolerance),
    ]


def _row_changes(packs):
    """Tokens to change, bool `[N, R, S]` each: of any two neighbours, or rows, one without the other."""
    is_token_NRS = packs["sequence_ids"] > 0
    num_steps, num_rows, length = is_token_NRS.shape
    starts_RL = _as_rows(is_token_NRS & (packs["position_ids"] == 0))
    numbers_NRS = np.cumsum(starts_RL, axis=1).reshape(num_rows, num_steps, length).transpose(1, 0, 2)
    rows_R1 = np.arange(1, num_rows + 1)[:, None]
    return halves(numbers_NRS * is_token_NRS) + halves(rows_R1 * is_token_NRS)


def _as_rows(values_NRS):
    """`[R, N * S]`: the packs of each row one after another."""
    return values_NRS.transpose(1, 0, 2).reshape(values_NRS.shape[1], -1)


def _row_step(model, batch):
    """Hidden states of a micro-batch as in training, and what the model carries after it."""
    hidden_BSD = model.encode(batch, training=True)
    # Values are returned: under JAX a compiled function's assignments are lost
    return hidden_BSD, [ops.convert_to_tensor(one) for one in model.non_trainable_weights]


def _run_rows(model, step, packs):
    """float32 `[N, R, S, D]`, in micro-batches of part of the rows."""
    num_steps, num_rows, length = packs["token_ids"].shape
    size = max(size for size in range(1, num_rows // 2 + 1) if num_rows % size == 0) if num_rows > 1 else 1
    batches = {name: packs[name].reshape(-1, size, length) for name in model.encoder_inputs}
    for one in model.non_trainable_weights:
        one.assign(ops.ones(one.shape))  # of the epoch before: no sequence may begin with it
    found = []
    for number in range(num_steps * num_rows // size):
        hidden_BSD, after = step({name: values[number] for name, values in batches.items()})
        for one, value in zip(model.non_trainable_weights, after, strict=True):
            one.assign(value)
        found.append(_to_numpy(hidden_BSD))
    return np.stack(found).reshape(num_steps, num_rows, length, -1)


def _uncut_rows(forward, packs):
    """float32 `[N, R, S, D]`, each row as one long pack."""
    num_steps, num_rows, length = packs["token_ids"].shape
    hidden_RLD = _to_numpy(forward({name: _as_rows(values) for name, values in packs.items()}))
    return hidden_RLD.reshape(num_rows, num_steps, length, -1).transpose(1, 0, 2, 3)
