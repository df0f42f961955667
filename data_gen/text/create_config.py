"""The settings of `create_pretraining_data.py`."""

import dataclasses
import math

from bert_packed.core.settings import (
    InputError,
    advanced,
    check_settings,
    result_settings,
    setting,
    unmet_settings,
)
from bert_packed.packing.histogram import MAX_LENGTH
from bert_packed.schema import CAUSAL_LM, MLM, MLM_NSP, OBJECTIVES
from bert_packed.text.masking import MASK_REPLACE_PROB, RANDOM_REPLACE_PROB, masking_rules
from data_gen.jobs.runners import LOCAL, MAX_WORKERS, RUNNER_HELP, RUNNERS, TEXT_WORKERS_HELP

# Headings in `--help`
TEXT, VOCABULARY, SEQUENCES, CALL = "Text and records", "Vocabulary", "Sequences and masks", "This call"
TOKENIZERS = WORDPIECE, BYTE_BPE = ("wordpiece", "byte_bpe")
NO_USE = "be left out with --{0}={{{0}}}, which has no use for it"
OF_BERT = {f"objective={MLM_NSP},{MLM}": NO_USE.format("objective")}
OF_PAIRS = {f"objective={MLM_NSP}": NO_USE.format("objective")}
OF_WORDPIECES = {f"tokenizer={WORDPIECE}": NO_USE.format("tokenizer")}
USUAL_RATES = {"mask_replace_prob": MASK_REPLACE_PROB, "random_replace_prob": RANDOM_REPLACE_PROB}


@dataclasses.dataclass(frozen=True)
class CreateConfig:
    """Makes BERT pre-training records from text: masked sentence pairs in google-research/bert's format.
    With --objective=causal_lm it makes pieces of documents with every next token as label, for models
    such as Mamba.

    Without --input_file it reads the embedded sample corpus. OUTPUT_DIR receives train-*.tfrecord,
    with --eval_fraction also eval-*.tfrecord, and vocab.txt, or tokenizer.json, and manifest.json.
    """

    input_file: str = setting(
        "",
        "text files, comma-separated paths or globs: one sentence a line and a blank line between documents, "
        "or JSON lines (.json, .jsonl, .ndjson) with `text`, each line of it a paragraph, or `paragraphs`; "
        "also .gz; with the extra `arrow` tables with such a column (.parquet, .arrow) and folders that "
        "Hugging Face's `datasets` saved; PART:2 reads the documents of that part twice as often, PART:0.5 "
        "half of them; hf://datasets/OWNER/NAME/FILES, of the Hugging Face hub (docs/guides/text.md); "
        "empty = the embedded sample corpus",
        group=TEXT,
    )
    output_dir: str = setting("", "where the records, vocabulary and manifest.json go", changeable=True)
    vocab_file: str = setting(
        "",
        "vocabulary, one WordPiece a line, or with --tokenizer=byte_bpe a tokenizer.json, such as "
        "ModernBERT's or GPT-NeoX's; empty = train one on the input",
        group=VOCABULARY,
    )
    vocab_size: int = setting(
        8192,
        "tokens of a vocabulary trained here",
        minimum=10,
        maximum=2**20,  # the largest published have a million; a billion aborts the tokenizer
    )
    text_column: str = setting(
        "text",
        "name of the text in JSON lines and tables, in the place of `text` and `paragraphs`",
        group=TEXT,
    )
    objective: str = setting(
        MLM_NSP,
        "what is to be learned: mlm_nsp, BERT's masked tokens and next sentences; mlm, masked tokens alone, "
        "of sequences that are full of one document's sentences, or with byte_bpe lines (RoBERTa, "
        "ModernBERT); or causal_lm, every next token "
        "of documents as they are (docs/guides/mamba.md)",
        choices=OBJECTIVES,
        group=SEQUENCES,
    )
    tokenizer: str = setting(
        WORDPIECE,
        "wordpiece, BERT's, or for mlm and causal_lm byte_bpe: byte-level BPE, kept in tokenizer.json",
        choices=TOKENIZERS,
        only_with={
            f"objective={MLM},{CAUSAL_LM}": f"be {WORDPIECE} with --objective={{objective}}, which reads "
            "sentences"
        },
        group=VOCABULARY,
    )
    do_lower_case: bool = setting(
        True, "lower-case the text and strip accents; false for cased vocabularies", only_with=OF_WORDPIECES
    )
    do_whole_word_mask: bool = setting(
        False,
        "mask all tokens of a word or none; with byte_bpe, white space alone separates words",
        only_with=OF_BERT,
        group=SEQUENCES,
    )
    mask_replace_prob: float = advanced(
        MASK_REPLACE_PROB,
        "share of the predicted tokens that become [MASK]",
        minimum=0.0,
        maximum=1.0,
        only_with=OF_BERT,
    )
    random_replace_prob: float = advanced(
        RANDOM_REPLACE_PROB,
        "share of them that become a random token; the rest stay as they are",
        minimum=0.0,
        maximum=1.0,
        only_with=OF_BERT,
    )
    max_seq_length: int = setting(
        512, "most tokens in a sequence, [CLS] and [SEP] included", minimum=8, maximum=MAX_LENGTH
    )
    max_predictions_per_seq: int = setting(
        0, "most masked tokens in a sequence; 0 = masked_lm_prob of the length, rounded up", only_with=OF_BERT
    )
    random_seed: int = setting(12345, "seed; equal seeds give equal bytes", maximum=2**32 - 1, group=TEXT)
    dupe_factor: int = setting(
        10,
        "passes over the training documents, each with other segments and masks",
        minimum=1,
        maximum=10**6,  # the limit of weights, too: their product counts readings
        only_with=OF_BERT,
    )
    masked_lm_prob: float = setting(
        0.15,
        "share of the tokens to predict, between 0 and 1",
        minimum=None,
        only_with=OF_BERT,
        group=SEQUENCES,
    )
    short_seq_prob: float = advanced(
        0.1, "share of documents cut to a random shorter length", minimum=0.0, maximum=1.0, only_with=OF_PAIRS
    )
    eval_fraction: float = setting(
        0.0,
        "share of the documents held out as split eval, one pass over each; at least one document where the "
        "share is not 0",
        minimum=0.0,
        maximum=0.5,
        group=TEXT,
    )
    num_workers: int = setting(0, TEXT_WORKERS_HELP, maximum=MAX_WORKERS, changeable=True, group=CALL)
    runner: str = advanced(LOCAL, RUNNER_HELP, choices=RUNNERS, changeable=True)
    num_shards: int = setting(
        8, "files of the train split; fewer where there are fewer documents", minimum=1, group=TEXT
    )
    provenance: bool = setting(False, "also write which document each record comes from, one index a file")
    overwrite: bool = setting(
        False, "replace the data files of an output directory that is in use", transient=True, group=CALL
    )
    json: str = setting("", "also write the printed table to this file, as JSON", transient=True)

    def __post_init__(self):
        check_settings(self)
        if not self.output_dir:
            raise InputError("`output_dir` must be given. Received: ''.")
        if self.objective == CAUSAL_LM:
            return
        if not 0 < self.masked_lm_prob < 1:
            raise InputError(f"`masked_lm_prob` must be between 0 and 1. Received: {self.masked_lm_prob}.")
        masking_rules(self)  # checks its shares
        if self.max_predictions_per_seq > self.max_seq_length - 3:
            raise InputError(
                "`max_predictions_per_seq` must be at most max_seq_length less [CLS] and two [SEP]. "
                f"Received: max_predictions_per_seq={self.max_predictions_per_seq}, "
                f"max_seq_length={self.max_seq_length}."
            )

    def check_given(self, names):
        """Refuse flags without effect, even if they were given with their defaults."""
        check_settings(self, set(names) - {"tokenizer"})  # whose default is the one for BERT

    @property
    def num_prediction_slots(self):
        """P: `max_predictions_per_seq`, or where that is 0 `masked_lm_prob` of a full sequence."""
        # The published 56 at length 384 and 76 at 512 are too few for 15 % and for larger shares
        default = math.ceil(round(self.max_seq_length * self.masked_lm_prob, 6))  # 0.07 * 100 is a bit over 7
        return self.max_predictions_per_seq or min(default, self.max_seq_length - 3)

    def resolved(self):
        """Dict of the settings that affect the result; for BERT, with P in place of 0."""
        unused = unmet_settings(self)
        # BERT's objective and tokenizer and the usual rates and column are left out, as in older manifests
        unused.update(["objective"] if self.objective == MLM_NSP else [])
        unused.update(name for name, usual in USUAL_RATES.items() if getattr(self, name) == usual)
        unused.update(["tokenizer"] if (self.objective, self.tokenizer) == (MLM, WORDPIECE) else [])
        unused.update(["vocab_size"] if self.vocab_file else [])
        unused.update(["text_column"] if self.text_column == "text" else [])
        settings = {name: value for name, value in result_settings(self).items() if name not in unused}
        if self.objective != CAUSAL_LM:
            settings["max_predictions_per_seq"] = self.num_prediction_slots
        return settings
