"""One pack of two sequences in each of our layouts, which tests of records read, break and convert."""

from bert_packed import schema

PACK = {
    schema.INPUT_IDS: [2, 7, 4, 3, 2, 9, 3, 0],
    schema.INPUT_MASK: [1, 1, 1, 1, 2, 2, 2, 0],
    schema.SEGMENT_IDS: [0, 0, 1, 1, 0, 0, 0, 0],
    schema.POSITION_IDS: [0, 1, 2, 3, 0, 1, 2, 0],
    schema.MASKED_LM_POSITIONS: [2, 5, 0],
    schema.MASKED_LM_IDS: [8, 9, 0],
    schema.MASKED_LM_WEIGHTS: [1, 2, 0],
    schema.NEXT_SENTENCE_POSITIONS: [0, 4, 0],
    schema.NEXT_SENTENCE_LABELS: [1, 0, 0],
    schema.NEXT_SENTENCE_WEIGHTS: [1, 1, 0],
}
# A pack for causal language modelling has a piece of a document that goes on, and a whole document
CAUSAL_PACK = {
    schema.INPUT_IDS: [0, 7, 4, 8, 0, 5, 0, 0],
    schema.INPUT_MASK: [1, 1, 1, 1, 2, 2, 2, 0],
    schema.POSITION_IDS: [0, 1, 2, 3, 0, 1, 2, 0],
    schema.LABEL_IDS: [7, 4, 8, 9, 5, 0, 0, 0],
    schema.LABEL_MASK: [1, 1, 1, 1, 2, 2, 0, 0],
    schema.SEQUENCE_WEIGHTS: [1, 1, 0],
    schema.SEQUENCE_BYTES: [14, 3, 0],
}
