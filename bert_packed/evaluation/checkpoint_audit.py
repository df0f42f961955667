"""Audit of a checkpoint on real packs: contamination, carried states, gradients and losses.

A mask may be wrong from some place of a pack on, from some sequence on, or in some tile of a kernel. Only
packs with a boundary there show it, and the first packs of a file may have none. So packs are chosen.

Legend: B packs, S pack length, K sequences per pack, X what a pack may show, C packs to choose from.
"""

import dataclasses

import numpy as np
from tqdm import tqdm

from bert_packed.architectures import registry
from bert_packed.core.hub import find_model
from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.data.read_order import PackIndex
from bert_packed.kernels.choose import TILE, choose_kernels
from bert_packed.objectives.features import SEQUENCES
from bert_packed.records.examples import parse_examples
from bert_packed.records.inputs import find_files
from bert_packed.records.tfrecords import FRAME_BYTES, read_batches
from bert_packed.schema import INPUT_MASK, MLM, MLM_NSP
from bert_packed.training.engines import choose_backend, make_engine

TILES = (TILE, 32)  # tokens; 32 is the GPU's in float32, of which other tiles and chunks are multiples


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """Audits contamination. It takes real packs, changes one sequence after another, and reports the
    largest change and gradient that the others see. Both must be exactly 0. Then it compares outputs,
    losses, accuracies and gradients with the same sequences unpacked. Packs of --split_sequences are
    also taken step by step, as in training. Each must continue the whole of the pack before it in its
    row, and nothing else. Of a model of vectors, from `bert-packed embed` or sentence-transformers, it
    audits the vectors, and a step whose loss ranks pairs of the packs' sequences.

    Prints a table. Exit status 0: all within tolerance; 1: not.
    """

    input_file: str = setting("", "packed TFRecords: comma-separated paths or globs", required=True)
    init_checkpoint: str = setting("", "model to audit: as in run_pretraining.py", required=True)
    bert_config_file: str = setting("", "the model's shape; empty = as stored with the checkpoint")
    num_packs: int = setting(
        8,
        "packs to audit, chosen from all of the files: of every depth, with boundaries in all tiles",
        minimum=1,
    )
    mlm_loss: str = setting(
        "per_sequence", "weight of a prediction, as in training", choices=registry.WEIGHTINGS
    )
    lm_loss: str = setting("per_token", "as mlm_loss, of a Mamba", choices=registry.WEIGHTINGS)
    attention: str = setting(
        "dense",
        "as in run_pretraining.py, without dropout of attention; dense is the loop of a Mamba",
        choices=registry.ATTENTIONS,
    )
    tolerance: float = setting(1e-5, "largest relative difference from unpacked sequences")
    json: str = setting("", "also write the table to this file")

    def __post_init__(self):
        check_settings(self)


def audit_checkpoint(config):
    """Audit a checkpoint; returns a dict for each check: `name`, `largest`, `tolerance` and `result`."""
    config = dataclasses.replace(config, init_checkpoint=find_model(config.init_checkpoint))
    choose_backend()
    # TensorFlow and Keras: not for --help
    from bert_packed.checkpoints import starting_weights
    from bert_packed.data import input_pipeline
    from bert_packed.data.batches import CheckedBatches
    from bert_packed.evaluation import contamination
    from bert_packed.objectives.pretraining import check_losses, choose_objective
    from bert_packed.parallel.targets import devices_here
    from bert_packed.records import record_rules
    from bert_packed.records.read_causal import find_num_rows
    from bert_packed.runs.vocabulary import find_vector_settings
    from bert_packed.training.backend import check_memory, out_of_memory_names

    files = find_files(config.input_file, "input_file")
    spec = record_rules.read_pack_spec(files)
    model_config = starting_weights.read_model_config(config.init_checkpoint, config.bert_config_file)
    # A plain config must not hide what the model was trained under
    stored = starting_weights.stored_ablations(config.init_checkpoint)
    model_config = registry.ablate(model_config, ",".join(stored))
    check_losses(config, spec.objective)
    # A model of masked tokens alone has no head for the next-sentence labels of such records
    learnt = spec.objective
    if learnt == MLM_NSP and starting_weights.stored_head(config.init_checkpoint)[0] == registry.MASKED_LM:
        learnt = MLM
    num_rows = find_num_rows(files)
    objective = choose_objective(learnt, model_config, config, num_rows)
    features, missing = objective.features, None
    # Read for how it pools; the records have no case
    vectors = find_vector_settings(config.init_checkpoint, lowers_case=True)
    if vectors:
        if config.mlm_loss != registry.WEIGHTINGS[0]:
            rule = "not be given for a model of vectors"
            raise InputError(f"`mlm_loss` must {rule}. Received: {config.mlm_loss}.")
        features = SEQUENCES
    if num_rows:  # which are taken from their beginning
        packed = input_pipeline.eval_batches(files, spec, config.num_packs, features)
    else:
        index, numbers, missing = choose_packs(files, spec, config.num_packs)
        packed = input_pipeline.chosen_packs(index, spec, numbers, features)
    batch = next(CheckedBatches(packed, files, spec, model_config, features))
    num_sequences = int(batch["slot_weights"].sum())
    # Every check would pass without neighbours, and prove nothing
    if not contamination.num_neighbours(batch):
        raise InputError("`input_file` must hold several sequences in a pack. Received: one in each.")
    if vectors:
        objective, batch = rank_pairs(batch, vectors)
    packs = contamination.take_rows(batch, num_rows) if num_rows else None
    check_memory(model_config)
    kernels = choose_kernels(
        config.attention, registry.without_dropout(model_config), spec.max_seq_length, devices_here().platform
    )
    engine = make_engine(
        objective.build_model(model_config, seed=0, num_rows=num_rows or None, **kernels.options),
        objective,
        micro_batch_size=int((batch["slot_weights"].sum(axis=1) > 0).sum()),
    )
    found = starting_weights.load(
        config.init_checkpoint, engine.weights(), model_config, engine.model.head, True
    )
    print("\n".join(found.lines()))
    print(
        f"audits {count_of(num_sequences, 'sequence')}; packs of more than one: "
        f"{contamination.num_neighbours(batch)}; attention: {kernels.description}"
    )
    num_slots, length = spec.max_sequences_per_pack, spec.max_seq_length
    if vectors:
        print(
            f"vectors: {vectors.pooling}; the loss ranks {count_of(num_sequences // 2, 'pair')} of sequences"
        )
    print(describe_boundaries(batch["sequence_ids"], num_slots, missing))
    if model_config.chunk_size:
        is_fused = {"scan", "duality"} & kernels.options.keys()
        chunk_length = min(TILE if is_fused else model_config.chunk_size, length)
        print(describe_places(batch, chunk_length, "the scan's chunks"))
    elif kernels.options:
        print(describe_places(batch, TILE, "the kernel's tiles"))
    with out_of_memory_names("the audit", "num_packs"):
        checks = contamination.audit(engine, batch, config.tolerance)
        if num_rows:
            checks += contamination.audit_rows(engine.model, packs, config.tolerance)
    # The only trace of a model that was trained without next-sentence loss
    checks.append(
        contamination.Check("settings: ablations of the checkpoint", len(registry.ablations(model_config)), 0)
    )
    return [{**dataclasses.asdict(check), "result": "pass" if check.passed else "FAIL"} for check in checks]


def rank_pairs(batch, settings):
    """The objective in which each second sequence of a batch answers the one before it, and its batch."""
    from bert_packed.tasks.embed.losses import RANKING, LossSettings, embedding_objective

    is_used_BK = np.asarray(batch["slot_weights"]) > 0
    num_pairs = int(is_used_BK.sum()) // 2  # an odd last sequence is in none
    places_BK = np.cumsum(is_used_BK).reshape(is_used_BK.shape) * is_used_BK
    places_BK = np.where(places_BK <= 2 * num_pairs, places_BK, 0).astype(np.int32)
    loss = LossSettings(RANKING, num_pairs, 2, settings.pooling, settings.normalize)
    return embedding_objective(loss), {**batch, "places": places_BK, "text_ids": places_BK}


def choose_packs(files, spec, num_packs):
    """Choose packs of every depth, and with a boundary in every tile, as far as `num_packs` allow.

    Packs that are not needed are spread over the files. Memory holds 9 bytes for each pack of the files.
    Returns their `PackIndex`, the ascending numbers of the packs, and bool `[X]`: what only others show.
    """
    index, numbers_C, shown_CX, is_shared = _find_candidates(files, spec)
    depths_C = np.argmax(shown_CX[:, : spec.max_sequences_per_pack], axis=1)
    missing_X, chosen = shown_CX.any(axis=0), []
    while missing_X.any() and len(chosen) < num_packs:
        # The deepest of those that show most: a fault may begin at the last sequence
        best = np.lexsort((depths_C, (shown_CX & missing_X).sum(axis=1)))[-1]
        missing_X &= ~shown_CX[best]
        chosen.append(best)
    others = np.setdiff1d(np.arange(index.num_packs), numbers_C[chosen])
    if is_shared[others].sum() >= num_packs - len(chosen):  # packs of one sequence show no neighbor
        others = others[is_shared[others]]
    num_more = min(num_packs - len(chosen), len(others))
    places = (2 * np.arange(num_more) + 1) * len(others) // max(2 * num_more, 1)
    return index, np.sort(np.concatenate([numbers_C[chosen], others[places]])), missing_X


def show_boundaries(sequence_ids_BS, num_slots):
    """Features of packs, bool `[B, X]`: a depth of 1..K, and for each of `TILES` the tiles with a boundary.

        sequence ids   1 1 | 1 2 | 2 0   ->   depth   0 1 0
        tiles of 2                            tiles   0 1 0

    `sequence_ids_BS` are of any integer type, 0 is padding.
    """
    is_boundary_BS = _find_boundaries(sequence_ids_BS)
    depths_B = (sequence_ids_BS[:, 0] > 0) + is_boundary_BS.sum(axis=1)
    starts = [np.arange(0, sequence_ids_BS.shape[1], tile) for tile in TILES]
    tiles = [np.logical_or.reduceat(is_boundary_BS, places, axis=1) for places in starts]
    return np.hstack([depths_B[:, None] == np.arange(1, num_slots + 1), *tiles])


def describe_boundaries(sequence_ids_BS, num_slots, missing_X=None):
    """A line on the depths of packs, the places of their boundaries, and what `choose_packs` misses."""
    shown_X = show_boundaries(sequence_ids_BS, num_slots).any(axis=0)
    places = np.flatnonzero(_find_boundaries(sequence_ids_BS).any(axis=0))
    tile, num_tiles = TILES[-1], -(-sequence_ids_BS.shape[1] // TILES[-1])
    line = (
        f"packs of {_join_runs(np.flatnonzero(shown_X[:num_slots]) + 1)} sequences, of at most {num_slots}; "
        f"sequences begin behind others {f'at {places[0]} to {places[-1]}, ' if len(places) else ''}in "
        f"{shown_X[-num_tiles:].sum()} of {num_tiles} tiles of {tile} tokens"
    )
    if missing_X is None or not missing_X.any():
        return line
    depths, tiles = np.flatnonzero(missing_X[:num_slots]) + 1, np.flatnonzero(missing_X[-num_tiles:])
    more = [f"packs of {_join_runs(depths)} sequences"] if len(depths) else []
    more += [f"tiles at {', '.join(map(str, tiles * tile))}"] if len(tiles) else []
    return f"{line}; a larger num_packs would show {' and '.join(more)}"


def describe_places(batch, length, name):
    """A line on the places, modulo `length`, at which sequences begin behind others."""
    begins_BS = (np.asarray(batch["position_ids"]) == 0) & (np.asarray(batch["sequence_ids"]) > 0)
    found = {int(place) % length for place in np.flatnonzero(begins_BS[:, 1:].any(axis=0)) + 1}
    missing = sorted(set(range(length)) - found)
    return f"sequences begin at {len(found)} of {length} places of {name} of {length} tokens" + (
        f"; not covered: {_join_runs(missing)}" if missing else ""
    )


def _find_candidates(files, spec):
    """`PackIndex`; numbers `[C]` of packs that show what none before of their depth does, and what `[C, X]`.

    Last, a bool of each pack of the files: whether it holds several sequences.
    """
    lengths, depth = {INPUT_MASK: spec.max_seq_length}, spec.max_sequences_per_pack
    seen_KX = show_boundaries(np.zeros((depth, spec.max_seq_length), np.int64), depth)  # nothing
    starts, offsets, numbers, shown, is_shared = [0], [], [], [seen_KX[:0]], [np.zeros(0, bool)]
    with tqdm(desc="choosing packs", unit=" packs", disable=None) as bar:
        for path in files:
            sizes = [np.zeros(1, np.int64)]
            for records in read_batches(path):
                ids_BS = parse_examples(records, lengths, narrow=lengths)[INPUT_MASK]
                shown_BX = show_boundaries(ids_BS, depth)
                depths_B = np.argmax(shown_BX[:, :depth], axis=1)
                is_shared.append(shown_BX[:, 1:depth].any(axis=1))
                for row in np.flatnonzero((shown_BX & ~seen_KX[depths_B]).any(axis=1)):
                    seen_X = seen_KX[depths_B[row]]
                    if (shown_BX[row] & ~seen_X).any():  # an earlier pack of the batch may have shown it
                        seen_X |= shown_BX[row]
                        numbers.append(starts[-1] + records.number - 1 + row)
                        shown.append(shown_BX[row : row + 1])
                sizes.append(records.ends - records.starts + FRAME_BYTES)
                bar.update(len(records))
            offsets.append(np.cumsum(np.concatenate(sizes)))
            starts.append(starts[-1] + len(offsets[-1]) - 1)
    index = PackIndex([str(path) for path in files], np.array(starts), offsets)
    return index, np.array(numbers, np.int64), np.concatenate(shown), np.concatenate(is_shared)


def _find_boundaries(sequence_ids_BS):
    """True where a sequence begins behind another: bool `[B, S]`."""
    is_boundary_BS = sequence_ids_BS > 0
    is_boundary_BS[:, 0] = False
    is_boundary_BS[:, 1:] &= sequence_ids_BS[:, 1:] != sequence_ids_BS[:, :-1]
    return is_boundary_BS


def _join_runs(numbers):
    """Ascending whole numbers as text: "0 to 2, 5"."""
    numbers = np.asarray(numbers)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
