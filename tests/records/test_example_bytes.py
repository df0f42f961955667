"""Examples serialized at once are, byte for byte, what TensorFlow writes one by one."""

import numpy as np
import pytest
from unpacked_records import example, make_features

from bert_packed.records.example_bytes import encode_varints, serialize_examples


@pytest.mark.parametrize("largest", [1, 127, 128, 16383, 16384, 2**16 - 1, 2**16, 2**21, 2**31 - 1, 2**40])
def test_serialization_equals_tensorflow(largest):
    values = np.random.default_rng(0).integers(0, largest, (20, 9), endpoint=True)
    values[3, 2] = largest
    features = {
        "input_ids": values,
        "next_sentence_labels": values[:, :1] % 2,
        "masked_lm_weights": values[:, :3] % 2,
    }
    expected = [example({name: column[row] for name, column in features.items()}) for row in range(20)]
    assert serialize_examples(features) == expected


def test_sizes_of_every_part_are_written_as_tensorflow_does():
    """Sizes of one byte end at 127, of two at 16383: of the values, the feature, its entry and the record."""
    for length in (*range(90, 135), *range(16340, 16390, 7), 16383, 16384):
        features = {"input_ids": np.full((1, length), 5), "gr\u00f6\u00dfe": np.zeros((1, 1), np.int64)}
        (record,) = serialize_examples(features)
        expected = {name: values[0] for name, values in features.items()}
        assert record == example(expected), length


def test_serialization_does_not_depend_on_the_order_of_features():
    features = make_features([3, 4], 5)
    turned = dict(reversed(features.items()))
    assert serialize_examples(features) == serialize_examples(turned)


def test_serialization_refuses_negative_numbers_and_ragged_batches():
    with pytest.raises(ValueError, match=r"must not be negative\. Received: -3"):
        serialize_examples({"input_ids": np.array([[1, -3]])})
    with pytest.raises(ValueError, match=r"must not be negative\. Received: -1"):
        serialize_examples({"input_ids": np.array([[1, 200], [-1, 0]])})
    with pytest.raises(ValueError, match=r"shape \[n, length\]"):
        serialize_examples({"input_ids": np.zeros((2, 3)), "input_mask": np.zeros((1, 3))})


def test_varints():
    content, ends = encode_varints(np.array([[1, 300], [5, 7]]))
    assert list(content) == [1, 172, 2, 5, 7] and ends.tolist() == [3, 5]
