"""Contrastive training steps and vectors of texts by sentence-transformers on torch, as its users have them.

It comes with the extra `reference`. Nothing here imports Keras: a `PeerProcess` holds torch alone.
"""

from benchmarks.peers.transformers_models import find_device, import_torch, make_update
from bert_packed.core.settings import InputError

KINDS = PLAIN, CACHED, CACHED_SORTED = "plain loss", "cached loss", "cached loss, sorted by length"


class SentenceTransformers:
    """A model of a folder, its losses of ranking on steps that it holds, and its encoder.

    It computes on a GPU where there is one. `steps` is a list of steps, each a list of columns of texts,
    anchors first; they are tokenized here, each column padded to its longest text. Of the cached loss a
    mini-batch has `mini_batch_size` texts, padded to its longest. For `CACHED_SORTED` the rows of a step are
    sorted by tokens. `recipe` is as in `transformers_models.Training`.
    """

    def __init__(self, folder, max_seq_length, steps, temperature, mini_batch_size, recipe):
        self._torch, _ = import_torch()
        try:
            import sentence_transformers
            from sentence_transformers import losses
        except ImportError as error:
            raise InputError(
                f"`reference` needs sentence-transformers: pip install -e '.[reference]'. Received: {error}."
            ) from error
        self._device = find_device(self._torch)
        self._model = sentence_transformers.SentenceTransformer(folder, device=self._device)
        self._model.max_seq_length = max_seq_length
        self._model.register_forward_pre_hook(self._count)
        scale = 1 / temperature
        plain = losses.MultipleNegativesRankingLoss(self._model, scale=scale)
        cached = losses.CachedMultipleNegativesRankingLoss(
            self._model, scale=scale, mini_batch_size=mini_batch_size
        )
        self._losses = {PLAIN: plain, CACHED: cached, CACHED_SORTED: cached}
        self._update = make_update(self._torch, self._model, **recipe)
        as_given = [[self._tokens(texts) for texts in columns] for columns in steps]
        in_order = [[self._tokens(texts) for texts in self._sorted(columns)] for columns in steps]
        self._steps = {PLAIN: as_given, CACHED: as_given, CACHED_SORTED: in_order}

    def loss(self, name):
        """Loss of the first step without dropout, and the number of tokens computed for it, padding included.

        The tokens are those of one pass.
        """
        self._model.eval()
        self._num_tokens = 0
        with self._torch.no_grad():  # not `inference_mode`, whose tensors the cached loss could not change
            value = self._of(name, 0).item()
        return value, self._num_tokens

    def step(self, name, repeat):
        """Step on one of the steps' rows, the next with each repeat; returns its loss."""
        self._model.train()
        return self._update(lambda: self._of(name, repeat))

    def encode(self, texts):
        """Vectors of length 1 by the package's `encode`, which sorts texts by length: float32 `[n, D]`."""
        return self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    def _of(self, name, repeat):
        steps = self._steps[name]
        # Models write into the features that they are given
        columns = [dict(features) for features in steps[repeat % len(steps)]]
        return self._losses[name](columns, None)

    def _tokens(self, texts):
        features = self._model.preprocess(texts)
        is_tensor = self._torch.is_tensor
        return {
            name: value.to(self._device) if is_tensor(value) else value for name, value in features.items()
        }

    def _sorted(self, columns):
        """The columns with their rows sorted by tokens, the longest first."""
        lengths = sum(self._model.preprocess(texts)["attention_mask"].sum(1) for texts in columns)
        order = lengths.argsort(descending=True, stable=True).tolist()
        return [[texts[row] for row in order] for texts in columns]

    def _count(self, _, inputs):
        self._num_tokens += inputs[0]["input_ids"].numel()
