"""Offline data preparation: text to instances, histogram, plan, packs and TFRecords, without Keras."""
