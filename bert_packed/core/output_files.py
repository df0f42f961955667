"""Former place of `storage.write_json`, until all importers are converted."""

from bert_packed.core.storage import write_json as write_json
