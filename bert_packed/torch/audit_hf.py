"""Audit of a model of `transformers` by each way of giving packs to it: `bert-packed audit-hf`."""

import dataclasses

from bert_packed.core.command_line import print_table
from bert_packed.core.hub import find_model
from bert_packed.core.settings import InputError, check_settings, setting

STATUS_FAILED = 1
ALL = "all"
# Heads without a value for each token: what leaks would leak before them
OF_SEQUENCES = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")


@dataclasses.dataclass(frozen=True)
class AuditHFConfig:
    """Audits a model of `transformers` on random packs, given to it in each way that `PackingCollator` of
    `bert_packed.torch` has. No token may see another sequence, and every sequence must get what the model
    gives it alone: outputs, gradients, in evaluation and in training.

    Prints a row for each way. Exit status 0: one of them is exact; 1: none is. Needs the extra `torch`.
    """

    model: str = setting(
        "",
        "folder of transformers, or NAME or NAME@REVISION of the hub; weights in safetensors",
        required=True,
    )
    attention: str = setting(
        ALL, "the collator's `attention` that is asked for", choices=(ALL, "mask", "positions", "varlen")
    )
    attn_implementation: str = setting(
        "", "of transformers: eager, sdpa, flash_attention_2, ...; empty = what it takes by itself"
    )
    device: str = setting("cpu", "device of torch, such as cuda; other kernels may leak there")
    json: str = setting("", "also write the table to this file")

    def __post_init__(self):
        check_settings(self)


def main(config):
    """Audit, print a row for each way, and return the exit status."""
    model = load_model(config)
    import torch  # only now

    from bert_packed.torch.exact_arguments import find_arguments

    attention = None if config.attention == ALL else config.attention
    candidates = list(find_arguments(model, in_float32=model.dtype == torch.float32, attention=attention))
    rows = [
        {
            "arguments of PackingCollator": str(one),
            "exact": "yes" if one.is_exact else "no",
            "largest difference": one.difference,
            "what fails": one.failed.name if one.failed else one.failure,
        }
        for one in candidates
    ]
    print_table(rows, config.json)
    return 0 if any(one.is_exact for one in candidates) else STATUS_FAILED


def load_model(config):
    """The model that a folder or name holds, with the head that its config names, on its device."""
    folder = find_model(config.model, flag="model")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"`bert-packed audit-hf` needs `pip install -e '.[torch]'`. Received: {error}."
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Kernels without float32
    dtype = torch.bfloat16 if "flash" in config.attn_implementation else torch.float32
    options = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    try:
        names = transformers.AutoConfig.from_pretrained(folder).architectures or ["AutoModel"]
        kind = getattr(transformers, names[0], transformers.AutoModel)
        if names[0].endswith(OF_SEQUENCES):
            kind = transformers.AutoModel
        model = kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, **options)
        return model.to(config.device).eval()
    # Each of its classes has errors of another kind
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        rule = "`model` must be one that transformers loads, with these settings"
        raise InputError(f"{rule}. Received: {config.model}; {reason}.") from error
