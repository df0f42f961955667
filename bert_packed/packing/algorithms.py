"""Every packing algorithm by name.

All are functions `pack(histogram, max_seq_length, max_sequences_per_pack, **settings)`:

    histogram                 int64 `[S]`, entry i counts the sequences of length i + 1
    max_seq_length            S, the tokens of a pack
    max_sequences_per_pack    depth, a whole number from 1, or "max" for no limit
    settings                  of some algorithms, by name

They return a `plan.PackingPlan`, and raise `ValueError` where an argument breaks its rule.
"""

from bert_packed.packing.baselines import pack_greedy, pack_local_greedy
from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.descending import pack_bfd, pack_ffd, pack_lpfhp, pack_spfhp
from bert_packed.packing.nnlshp import pack_ennlshp, pack_nnlshp

DEFAULT_ALGORITHM = "cghp"
ALGORITHMS = {
    "cghp": pack_cghp,
    "spfhp": pack_spfhp,
    "lpfhp": pack_lpfhp,
    "nnlshp": pack_nnlshp,
    "ennlshp": pack_ennlshp,
    "ffd": pack_ffd,
    "bfd": pack_bfd,
    "greedy": pack_greedy,
    "local_greedy": pack_local_greedy,
}
ALGORITHM_NAMES = tuple(ALGORITHMS)
