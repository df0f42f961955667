"""Feature names, dtypes and shapes of records: the contract between `data_gen` and training.

Legend: S pack length in tokens, K sequences per pack, P predictions per pack.

An unpacked record is google-research/bert's pre-training example. A packed record holds up to K sequences,
contiguous from 0, with padding last; the weights of its predictions are as in Listing 1 of "Packing: Towards
2x NLP BERT Acceleration". Two sequences of lengths 4 and 3 in a pack of S=8, K=3, P=3:

    input_ids               [ 2  7  4  3  2  9  3  0]     4 = [MASK], 2 = [CLS], 3 = [SEP], 0 = padding
    input_mask              [ 1  1  1  1  2  2  2  0]     the token's sequence, 1..K; 0 = padding
    segment_ids             [ 0  0  1  1  0  0  0  0]     sentence A/B
    position_ids            [ 0  1  2  3  0  1  2  0]     restarts in every sequence
    masked_lm_positions     [ 2  5  0]                    index into the pack, ascending
    masked_lm_ids           [ 8  9  0]                    label
    masked_lm_weights       [ 1. 2. 0.]                   the prediction's sequence (or 1); 0 = unused
    next_sentence_positions [ 0  4  0]                    the place of each sequence's [CLS]
    next_sentence_labels    [ 1  0  0]                    1 = random next sentence
    next_sentence_weights   [ 1. 1. 0.]                   1 = the slot holds a sequence

Records for causal language modelling hold the token that follows instead of masks and sentence pairs. An
unpacked one has no padding; a packed one has no P. The first piece of a longer document, of length 4,
and a whole document of length 3, 0 = <|endoftext|>, which 9 would follow:

    input_ids               [ 0  7  4  8  0  5  0  0]     0 is padding too: see the masks
    input_mask              [ 1  1  1  1  2  2  2  0]     the token's sequence, 1..K; 0 = padding
    position_ids            [ 0  1  2  3  0  1  2  0]     restarts in every sequence
    label_ids               [ 7  4  8  9  5  0  0  0]     the next token of the same document; 0 = none
    label_mask              [ 1  1  1  1  2  2  0  0]     the sequence that predicts here; 0 = nothing
    sequence_weights        [ 1. 1. 0.]                   1 = the slot holds a sequence
    sequence_bytes          [14  3  0]                    of the text of the sequence's labels
"""

import dataclasses

INPUT_IDS = "input_ids"
INPUT_MASK = "input_mask"
SEGMENT_IDS = "segment_ids"
POSITION_IDS = "position_ids"
MASKED_LM_POSITIONS = "masked_lm_positions"
MASKED_LM_IDS = "masked_lm_ids"
MASKED_LM_WEIGHTS = "masked_lm_weights"
NEXT_SENTENCE_POSITIONS = "next_sentence_positions"
NEXT_SENTENCE_LABELS = "next_sentence_labels"
NEXT_SENTENCE_WEIGHTS = "next_sentence_weights"

LABEL_IDS = "label_ids"
LABEL_MASK = "label_mask"
NUM_BYTES = "num_bytes"
LABEL_BYTES = "label_bytes"
SEQUENCE_WEIGHTS = "sequence_weights"
SEQUENCE_BYTES = "sequence_bytes"

PADDING_ID = 0  # the id of [PAD] in every BERT vocabulary

# Objectives: masked tokens and next sentences, masked tokens alone, or every next token.
MLM_NSP, MLM, CAUSAL_LM = OBJECTIVES = ("mlm_nsp", "mlm", "causal_lm")
# Records for `MLM` have the form of those for `MLM_NSP`, sentence A and label 0 throughout, so that
# readers of these read them too. Only manifests show the difference.
FORMS = {MLM_NSP: MLM_NSP, MLM: MLM_NSP, CAUSAL_LM: CAUSAL_LM}

# Feature name -> its length: "S", "K", "P", or 1.
PACKED_LENGTHS = {
    INPUT_IDS: "S",
    INPUT_MASK: "S",
    SEGMENT_IDS: "S",
    POSITION_IDS: "S",
    MASKED_LM_POSITIONS: "P",
    MASKED_LM_IDS: "P",
    MASKED_LM_WEIGHTS: "P",
    NEXT_SENTENCE_POSITIONS: "K",
    NEXT_SENTENCE_LABELS: "K",
    NEXT_SENTENCE_WEIGHTS: "K",
}
UNPACKED_LENGTHS = {
    INPUT_IDS: "S",
    INPUT_MASK: "S",
    SEGMENT_IDS: "S",
    MASKED_LM_POSITIONS: "P",
    MASKED_LM_IDS: "P",
    MASKED_LM_WEIGHTS: "P",
    NEXT_SENTENCE_LABELS: 1,
}
# Records for causal language modelling have these. Unpacked, "n" is the length of the sequence
CAUSAL_LENGTHS = {
    INPUT_IDS: "S",
    INPUT_MASK: "S",
    POSITION_IDS: "S",
    LABEL_IDS: "S",
    LABEL_MASK: "S",
    SEQUENCE_WEIGHTS: "K",
    SEQUENCE_BYTES: "K",
}
CAUSAL_UNPACKED_LENGTHS = {INPUT_IDS: "n", LABEL_IDS: "n", LABEL_MASK: "n", NUM_BYTES: 1}
# Ours hold the bytes of each label too, by which the parts of a sequence that is cut across packs share its
# `num_bytes`.
CAUSAL_OPTIONAL_LENGTHS = {LABEL_BYTES: "n"}
# Values of `masked_lm_weights` in packs: the sequence, or, for programs to which they are weights, 1 for all.
# The sequence of a prediction is that of its place, so that readers need not know which.
SEQUENCE, BINARY = MASKED_LM_WEIGHTS_KINDS = ("sequence", "binary")

# These are float32, all others int64
FLOAT_FEATURES = frozenset({MASKED_LM_WEIGHTS, NEXT_SENTENCE_WEIGHTS, SEQUENCE_WEIGHTS})

# max_seq_length -> google-research/bert's max_predictions_per_seq (15 % of it, rounded as published)
PREDICTIONS_PER_SEQUENCE = {128: 20, 384: 56, 512: 76}


@dataclasses.dataclass(frozen=True)
class PackSpec:
    """The fixed shapes of packed records."""

    max_seq_length: int  # S, tokens
    max_sequences_per_pack: int  # K
    max_predictions_per_pack: int  # P, at least 1; 0 for causal language modelling: labels on every token

    @property
    def objective(self):
        """Objective of packs of this form: `MLM_NSP` or `CAUSAL_LM`."""
        return MLM_NSP if self.max_predictions_per_pack else CAUSAL_LM

    @property
    def lengths(self):
        """The features of such packs: `PACKED_LENGTHS` or `CAUSAL_LENGTHS`."""
        return PACKED_LENGTHS if self.max_predictions_per_pack else CAUSAL_LENGTHS

    def shape(self, feature):
        """Shape of a packed feature, one of `(S,)`, `(P,)`, `(K,)`."""
        return (self.size({**PACKED_LENGTHS, **CAUSAL_LENGTHS}[feature]),)

    def size(self, kind):
        return dict(zip("SKP", dataclasses.astuple(self), strict=True))[kind]


def dtype(feature):
    """NumPy dtype name of a feature in a record."""
    return "float32" if feature in FLOAT_FEATURES else "int64"


def default_predictions(max_seq_length):
    """google-research/bert's `max_predictions_per_seq` for a length; elsewhere the same share, rounded up."""
    return PREDICTIONS_PER_SEQUENCE.get(max_seq_length, -int(-max_seq_length * 0.15 // 1))
