"""Former name of `storage.py`, until all importers are converted."""

import sys

from bert_packed.core import storage

sys.modules[__name__] = storage
