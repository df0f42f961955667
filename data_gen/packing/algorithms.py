"""Every packing algorithm by name: all take (histogram, max_seq_length, max_sequences_per_pack)."""

from data_gen.packing.lpfhp import pack_lpfhp
from data_gen.packing.spfhp import pack_spfhp

ALGORITHMS = {
    "spfhp": pack_spfhp,
    "lpfhp": pack_lpfhp,
}
ALGORITHM_NAMES = tuple(ALGORITHMS)
