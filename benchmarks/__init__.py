"""Benchmarks and the papers' experiments: `python -m benchmarks.NAME` in a checkout; `--help` explains each.

    training_speed     packed against unpacked, a BERT without packs, and the programs of others
    accelerator        one GPU or TPU: exactness, steps, speed-ups, the largest micro-batch, and peers
    forecast           memory and time of a step on TPUs and GPUs that are not here, by their compilers
    inference_speed    vectors of texts per second, packed, padded, and by transformers
    learning_curves    packed against unpacked over sequences and hours, and the ablations
    full_pretraining   both phases of pre-training and SQuAD, packed and unpacked, in small
    run_curves         curves of any runs in one table and one picture
    finetuning         packed fine-tuning runs against unpacked ones: scores and speed
    data_throughput    encoding and packing records: speed, memory, phases
    packing_tables     the papers' packing tables beside ours
    packing_speed      speed and quality of the packing algorithms
    unpadding          un-padding by number of devices, against packing
    long_contexts      steps of a ModernBERT by the length of its packs, beside transformers
    packmamba          the figures of PackMamba: padding, speed, operators, other scans
    block_cycles       cycles of a Mamba's block on a TPU that is not here, by its compiler
    parallelism        communication, memory and scaling of layouts over devices
    overhead           what the attention mask, fresh masks and restarts of a Mamba add
    step_profile       time of a training step by part, beside the machine's rates
    step_memory        memory of a training step
    start_up           time to a command's help, and to the first batch of a training

Every benchmark prints tables and, with `--json`, writes them with machine, date and commit (`results.py`).
`results_page` makes docs/evidence/results.md of such files, and lists the commands that write them.
"""
