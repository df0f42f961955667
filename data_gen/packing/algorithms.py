"""Every packing algorithm by name: all take (histogram, max_seq_length, max_sequences_per_pack)."""

from data_gen.packing.column_generation import pack_cghp
from data_gen.packing.lpfhp import pack_lpfhp
from data_gen.packing.spfhp import pack_spfhp

DEFAULT_ALGORITHM = "cghp"
ALGORITHMS = {
    "cghp": pack_cghp,
    "spfhp": pack_spfhp,
    "lpfhp": pack_lpfhp,
}
ALGORITHM_NAMES = tuple(ALGORITHMS)
