"""Benchmarks and the papers' experiments: `python -m benchmarks.NAME` in a checkout; `--help` explains each.

    training_speed     packed against unpacked, a BERT without packs, and the programs of others
    accelerator        one GPU or TPU: exactness, steps, speed-ups, and peers
    roofline           launches, bytes, products and memory of a step on TPUs and GPUs that are not here
    inference_speed    vectors of texts per second, packed, padded, and by transformers
    embedding          contrastive training and vectors of texts, and by sentence-transformers
    classification     training of classifiers, and by transformers
    wikipedia_topics   a task of eight topics, written from sentences of Wikipedia
    learning_curves    packed against unpacked over sequences and hours, and the ablations
    full_pretraining   both phases of pre-training and SQuAD, packed and unpacked, in small
    run_curves         curves of any runs in one table and one picture
    finetuning         packed fine-tuning runs against unpacked ones: scores and speed
    trainer            classifiers by transformers' Trainer on packs and on padded batches
    audited_models     which arguments of the collator are exact for models of transformers
    data_throughput    packing records from file to file: speed, memory, phases
    packing_tables     the papers' packing tables beside ours
    packing_speed      speed and quality of the packing algorithms
    packmamba          the figures of PackMamba: padding, speed, cost of restarts
    parallelism        communication and memory of layouts over devices
    step_memory        memory of a training step
    device_session     the commands to run while an accelerator is lent
    soak               any command killed at random moments, against the same left alone

Every benchmark prints tables in Markdown and, with `--json`, writes them with machine, date and commit
(`runner.py`). A table of docs/evidence/results.md is what a command printed; docs/evidence/data has its JSON.
"""
