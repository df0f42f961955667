"""The operations that a model needs to learn from sequences, forward and backward, whatever computes them.

A share of the machine's rate that is reached with them is the model-FLOP utilisation.

Legend, of these formulas alone: N weights that multiply, L blocks, D model width, F feed-forward width,
V vocabulary, E inner width, Z states of a channel, W taps of the convolution.
"""


def bert_flops(config, sums, next_sentences=True):
    """The operations of a BERT.

    As Appendix B of "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al. 2022) counts: 6 N a
    token, two for the forward pass of each weight and four for the backward, and 12 L D T for the attention
    of a token to T others. What a step computes beyond that is no merit of it and does not count: padding,
    the scores between sequences of a pack, which are masked out, and what `--remat` computes again. So

        6 L (4 D^2 + 2 D F)      a token
        12 L D                   a pair of tokens of one sequence, each token with itself too
        6 (D^2 + D V)            a masked-LM prediction
        6 (D^2 + 2 D)            a sequence, for its next-sentence prediction

    Embedding look-ups, norms, softmax and the optimizer's update are no matrix products. The heads of
    fine-tuning, of few columns, are left out.

    Args:
        config: `ModelConfig`.
        sums: Dict with `num_tokens`, `num_sequences`, `num_pairs` and, in pre-training, `num_predictions`.
        next_sentences: Whether pre-training predicts them.

    Returns:
        float.
    """
    width, blocks = config.hidden_size, config.num_hidden_layers
    per_token = 6 * blocks * (4 * width**2 + 2 * width * config.intermediate_size)
    flops = per_token * sums["num_tokens"] + 12 * blocks * width * sums["num_pairs"]
    if "num_predictions" in sums:
        flops += 6 * (width**2 + width * config.vocab_size) * sums["num_predictions"]
        flops += 6 * (width**2 + 2 * width) * sums["num_sequences"] * next_sentences
    return flops


def mamba_flops(config, sums):
    """The operations of a Mamba, counted as `bert_flops` counts.

        6 L N                    a token, N = 2 D E + E (rank + 2 Z) + rank E + E D weights that multiply
        6 L W E                  a token, W taps of the convolution
        21 L E Z                 a token, for its states
        6 D V                    a prediction

    A state takes 7 forward (its exponent, the exponential, the product with the state before, what goes in,
    the sum of both, the product with C and its sum) and 14 backward: the gradient of the state 3, a product
    and a sum for each of step size, A, input, B and C, and a product that the first two share. The compiled
    program executes nearly twice as many: it computes states again, and XLA some products wherever used.

    Args:
        config: `MambaConfig`.
        sums: Dict with `num_tokens` and `num_predictions`.

    Returns:
        float.
    """
    width, inner, states, rank = config.hidden_size, config.inner_size, config.state_size, config.step_rank
    weights = 2 * width * inner + inner * (rank + 2 * states) + rank * inner + inner * width
    per_token = 6 * weights + 6 * config.conv_kernel * inner + 21 * inner * states
    per_prediction = 6 * width * config.vocab_size
    return (
        config.num_hidden_layers * per_token * sums["num_tokens"] + per_prediction * sums["num_predictions"]
    )
