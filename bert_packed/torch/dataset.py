"""Packed TFRecords as a `torch.utils.data.IterableDataset`: sharded, shuffled, and resumed at any pack.

Legend: S pack length, P predictions per pack, K sequences per pack.
"""

import numpy as np
import torch

from bert_packed import schema
from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.assembly.given_columns import refuse
from bert_packed.data.read_order import index_files, read_order, read_packs
from bert_packed.packing.arguments import MAX_SEED, check_whole
from bert_packed.records import inputs
from bert_packed.records.examples import parse_example
from bert_packed.records.provenance import read_manifest
from bert_packed.records.record_rules import read_pack_spec
from bert_packed.torch.labelled_rows import IGNORED

# transformers has other names than records for these
ITEM_NAMES = {
    schema.SEGMENT_IDS: "token_type_ids",
    schema.INPUT_MASK: "sequence_ids",
    schema.MASKED_LM_WEIGHTS: "masked_lm_sequences",
    schema.NEXT_SENTENCE_POSITIONS: "cls_positions",
}


class PackedDataset(torch.utils.data.IterableDataset):
    """Each pack once per epoch, over all ranks and DataLoader workers together.

    Empty packs (.), which have no weight in the loss, give all ranks equally many. 7 packs, in shuffled
    order:

        rank 0, worker 0    0 4        rank 1, worker 0    1 5
        rank 0, worker 1    2 6        rank 1, worker 1    3 .

    An item is a dict of int64 tensors; the first four are arguments of `transformers.BertModel`:

    | name | shape | meaning |
    |---|---|---|
    | `input_ids` | `[S]` | WordPieces; 0 is padding |
    | `token_type_ids` | `[S]` | sentence A/B |
    | `position_ids` | `[S]` | restarts at 0 in every sequence |
    | `attention_mask` | `[1, S, S]`, `mask_dtype` | see `bert_packed.attention_mask` |
    | `sequence_ids` | `[S]` | the token's sequence 1..K; 0 is padding |
    | `masked_lm_positions` | `[P]` | positions of the predictions in the pack |
    | `masked_lm_ids` | `[P]` | their labels |
    | `masked_lm_sequences` | `[P]` | the prediction's sequence 1..K; 0 is unused |
    | `cls_positions` | `[K]` | position of each sequence's [CLS] |
    | `next_sentence_labels` | `[K]` | 1 = random next; -100, ignored, in packs for masked LM alone |
    | `next_sentence_weights` | `[K]`, float32 | 1 = the slot holds a sequence |

    `state_dict` and `load_state_dict` are for `torchdata.stateful_dataloader.StatefulDataLoader`; a plain
    `torch.utils.data.DataLoader` can be resumed by them only if it has no workers.

    Args:
        input_file: Packed TFRecords: comma-separated paths or globs.
        seed: Seed of the order, which changes with each epoch.
        shuffle_buffer_size: Packs held in memory and shuffled together; 1 for the order on disk.
        rank, world_size: Process and their number; by default those of `torch.distributed`, else 0 and 1.
        mask_dtype: Dtype of `attention_mask`, by far the largest tensor; None to make it on the device.
        index_file: File that keeps the positions of packs, so that only the first start reads all files.

    Attributes:
        spec: `PackSpec`: S, K and P.
        num_packs: Packs per epoch, of all ranks.

    Raises:
        ValueError: an argument breaks its rule. Or a file holds no packs for masked tokens and next
            sentences, is damaged, or disagrees with the others or with the manifest beside it.
    """

    def __init__(
        self,
        input_file,
        seed=0,
        shuffle_buffer_size=1000,
        rank=None,
        world_size=None,
        mask_dtype=torch.float32,
        index_file=None,
    ):
        super().__init__()
        if (rank is None) != (world_size is None):
            refuse("`rank` and `world_size`", "be given together", f"{rank} and {world_size}")
        if rank is None:
            rank, world_size = _find_rank()
        check_whole("world_size", world_size, 1)
        check_whole("rank", rank, 0, world_size - 1)
        check_whole("shuffle_buffer_size", shuffle_buffer_size, 1)
        check_whole("seed", seed, maximum=MAX_SEED)
        paths = inputs.find_files(str(input_file), "input_file")
        self.spec = read_pack_spec(paths, pattern=str(input_file))
        if self.spec.objective != schema.MLM_NSP:
            received = f"{paths[0]}, for {self.spec.objective}"
            refuse("`input_file`", f"hold packs for {schema.MLM_NSP}", received)
        self._index = _index(paths, index_file)
        self._mlm_folders = {
            folder
            for folder in {inputs.folder_of(path) for path in paths}
            if (read_manifest(folder, any_json=True) or {}).get("objective") == schema.MLM
        }
        self.num_packs = self._index.num_packs
        self._seed, self._shuffle_buffer_size = seed, shuffle_buffer_size
        self._rank, self._world_size, self._mask_dtype = rank, world_size, mask_dtype
        # The epoch is in shared memory: persistent workers would never see a change of a copied number
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._state = None  # where the next iteration continues
        self._num_read, self._read_epoch = 0, 0  # of the iteration that began last

    def set_epoch(self, epoch):
        """Choose the epoch of later iterations; without this call all epochs have the same order."""
        # An epoch other than that of a loaded state begins at its first pack
        if self._state and self._state["epoch"] != epoch:
            self._state = None
        self._epoch.fill_(epoch)

    def state_dict(self):
        """Position of this process's or worker's iteration: dict of integers."""
        if self._state:
            return dict(self._state)
        epoch = int(self._epoch)
        num_read = self._num_read if epoch == self._read_epoch else 0
        return {"epoch": epoch, "num_read": num_read, **self._settings()}

    def load_state_dict(self, state):
        """Make the next iteration continue from a state, of any rank, with the same worker and arguments."""
        self._epoch.fill_(state["epoch"])
        self._state = dict(state)

    def __iter__(self):
        # The generator starts only with the first pack: until then `state_dict` would be wrong
        state, self._state = self._state, None
        self._num_read, self._read_epoch = 0, int(self._epoch)
        if state:
            check_state(state, self._settings())
            self._num_read = state["num_read"]
        return self._read(self._read_epoch, self._num_read)

    def _read(self, epoch, num_read):
        """Yield this worker's items of an epoch after the first `num_read`."""
        worker, num_workers = find_worker()
        share, num_shares = self._rank + worker * self._world_size, num_workers * self._world_size
        place = min(share + num_read * num_shares, self.num_packs)
        first = epoch * self.num_packs + place
        blocks = read_order(self.num_packs, self._seed, self._shuffle_buffer_size, first)
        while place < self.num_packs:
            packs = next(blocks)
            is_own = np.arange(place, place + len(packs)) % num_shares == share
            place += len(packs)
            for features in self._read_packs(packs[is_own]):
                self._num_read += 1
                yield self._to_item(features)
        # Empty packs follow until this rank has as many as the first
        most_per_rank = -(-self.num_packs // self._world_size)
        for _ in range(self._num_read, len(range(worker, most_per_rank, num_workers))):
            self._num_read += 1
            yield self._to_item(
                {name: np.zeros(self.spec.shape(name), schema.dtype(name)) for name in self.spec.lengths}
            )

    def _read_packs(self, packs):
        if not len(packs):
            return
        lengths = {name: self.spec.size(kind) for name, kind in self.spec.lengths.items()}
        for record, file, number in read_packs(self._index, packs):
            path = self._index.files[file]
            features = parse_example(record, path, number, lengths)
            if inputs.folder_of(path) in self._mlm_folders:
                labels = features[schema.NEXT_SENTENCE_LABELS]
                features[schema.NEXT_SENTENCE_LABELS] = np.full_like(labels, IGNORED)
            yield features

    def _to_item(self, features):
        """Rename the features of a pack to transformers' names."""
        values = {name: torch.from_numpy(array) for name, array in features.items()}
        sequence_ids, positions = values[schema.INPUT_MASK], values[schema.MASKED_LM_POSITIONS]
        item = {ITEM_NAMES.get(name, name): array for name, array in values.items()}
        # Positions say the sequence: in records for other programs the weights are 0 and 1
        item["masked_lm_sequences"] = sequence_ids[positions] * (item["masked_lm_sequences"] > 0)
        if self._mask_dtype is not None:
            item["attention_mask"] = attention_mask(sequence_ids, self._mask_dtype)
        return item

    def _settings(self):
        return {
            # `num_read` would count different packs under other settings
            "seed": self._seed,
            "shuffle_buffer_size": self._shuffle_buffer_size,
            "num_packs": self.num_packs,
            "world_size": self._world_size,
            "num_workers": find_worker()[1],
        }


def _find_rank():
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def check_state(state, settings):
    """Refuse a state that was made under other settings than these."""
    for name, value in settings.items():
        if state[name] != value:
            refuse(f"`{name}`", f"be {state[name]}, as when the state was made", value)


def find_worker():
    worker = torch.utils.data.get_worker_info()
    return (worker.id, worker.num_workers) if worker else (0, 1)


def _index(paths, index_file):
    """`PackIndex` of files, checked against their manifests."""
    scans = inputs.read_scans(index_file, paths) if index_file else {}
    new = [path for path in paths if path not in scans]
    scans |= {path: inputs.scan_unchanged(path) for path in new}
    index = index_files(paths, [scans[path][0] for path in paths])
    for path, promised in inputs.read_promises(paths).items():
        scan, _ = scans[path]
        inputs.check_promises(promised, path, scan.num_records, scan.sha256)
    if index_file and new:
        inputs.write_scans(index_file, scans)
    return index
