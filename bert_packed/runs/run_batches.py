"""Batches of a pre-training run: this process's part of each, checked, masked and grown."""

import functools
import itertools

from bert_packed.data import input_pipeline
from bert_packed.data.batches import CheckedBatches, GrowingBatches, ReadAhead
from bert_packed.data.dynamic_masking import MaskedBatches
from bert_packed.data.read_order import ProcessShard, balance_steps
from bert_packed.parallel.replicas import count_replicas, group_of


def train_batches(run, first_step=0, packs=None):
    """`ReadAhead` of the endless batches of a `Run` from `first_step` on, this process's part of each.

    `packs` are `PackedFiles`; None for the training packs.
    """
    config, masking, features = run.config, run.data.masking, run.objective.features
    num_devices, packs = 0 if packs else config.balanced_devices, packs or run.data.train
    shard, batch_size, first_batch = shard_of(run), config.train_batch_size, first_step
    growth, sizes = config.growth, itertools.repeat(batch_size)
    if growth:
        # Read micro-batch by micro-batch: a step is as many of them as it has grown to
        batch_size = config.packs_at_once
        first_batch = growth.packs_before(first_step) // batch_size
        sizes = (int(growth.packs(step)) for step in itertools.count(first_step))
    arrange = None
    if num_devices > 1:
        arrange = functools.partial(
            balance_steps,
            sizes=sizes,
            count_pairs=packs.count_pairs,
            num_devices=num_devices,
            micro_batch_size=config.packs_at_once,
            num_packs=packs.index.num_packs,
            first=first_batch * batch_size,
        )
    packed = input_pipeline.train_batches(
        packs.index,
        packs.spec,
        batch_size,
        config.random_seed,
        config.shuffle_buffer_size,
        first_batch,
        features,
        shard,
        arrange,
    )
    batches = CheckedBatches(packed, packs.files, packs.spec, run.model_config, features)
    if masking:
        batches = MaskedBatches(batches, masking, packs.index, shard, batch_size, first_batch)
    if growth:
        batches = GrowingBatches(batches, growth, first_step)
    return ReadAhead(batches)


def eval_batches(run):
    """Batches of the held-out packs of a `Run`, this process's part of each; none without such packs."""
    packs, features = run.data.eval, run.objective.features
    if not packs.files:
        return ()
    packed = input_pipeline.eval_batches(
        packs.files, packs.spec, run.config.eval_batch_size, features, shard_of(run), packs.index
    )
    return CheckedBatches(packed, packs.files, packs.spec, run.model_config, features)


def shard_of(run):
    """The packs of a step that this process reads."""
    config, num, index = run.config, run.processes.num, run.processes.index
    if config.layout != "none":
        # The processes that share one copy of the model compute the same packs
        index, num = group_of(index, num, count_replicas(config.layout, config.mesh_shape))
    return ProcessShard(config.packs_at_once, index, num)
