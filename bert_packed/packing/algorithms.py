"""Every packing algorithm by name: all take (histogram, max_seq_length, max_sequences_per_pack)."""

from bert_packed.packing.baselines import pack_bfd, pack_ffd, pack_greedy, pack_local_greedy
from bert_packed.packing.column_generation import pack_cghp
from bert_packed.packing.lpfhp import pack_lpfhp
from bert_packed.packing.nnlshp import pack_ennlshp, pack_nnlshp
from bert_packed.packing.spfhp import pack_spfhp

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
