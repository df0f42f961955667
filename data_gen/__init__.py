"""Offline half of bert_packed: text to instances, histogram, plan, packs and TFRecords. No Keras here."""
