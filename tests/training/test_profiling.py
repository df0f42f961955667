"""The profile of some steps: files where TensorBoard looks for them, with the steps of the setting."""

import contextlib

import keras
import numpy as np
import pytest

from bert_packed.training import backend
from bert_packed.training.backend import Profile, compiled

pytestmark = pytest.mark.both_backends


def steps_in(folder):
    """Numbers of the steps that the traces below a folder hold."""
    pytest.importorskip("tensorflow")
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    found = []
    for path in sorted(folder.glob("plugins/profile/*/*.xplane.pb")):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            names = {key: value.name for key, value in plane.stat_metadata.items()}
            events = {key: value.name for key, value in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    stats = {names[stat.metadata_id]: stat for stat in event.stats}
                    if events[event.metadata_id].startswith("train") and "step_num" in stats:
                        stat = stats["step_num"]
                        found.append(int(stat.int64_value or stat.uint64_value or stat.str_value))
    return found


def test_the_steps_asked_for_are_traced(tmp_path):
    square = compiled(lambda a: keras.ops.matmul(a, a))
    matrix = np.ones((64, 64), np.float32)
    with Profile(tmp_path, range(3, 5)) as profile:
        for step in range(1, 7):
            with profile.step(step):
                np.asarray(square(matrix))
        files = list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
        assert len(files) == 1  # written when the last step was over
    assert steps_in(tmp_path) == [3, 4]
    assert len(list(tmp_path.glob("plugins/profile/*"))) == 1


@pytest.mark.parametrize(
    ("asked", "steps", "ends_at", "calls"),
    [
        (range(2, 9), range(1, 9), 4, ["start", 2, 3, "end"]),  # a run that stops in between
        (range(2, 5), range(3, 7), None, ["start", 3, 4, "end", 5, 6]),  # one that continues in between
        (None, range(1, 3), None, [1, 2]),
    ],
)
def test_steps_in_the_range_are_traced(monkeypatch, asked, steps, ends_at, calls):
    found = []

    @contextlib.contextmanager
    def trace(_):
        found.append("start")
        try:
            yield
        finally:
            found.append("end")

    monkeypatch.setattr(backend, "_profiler", lambda: (trace, lambda **_: contextlib.nullcontext()))
    profile = Profile("x", asked) if asked else Profile()
    with pytest.raises(KeyError) if ends_at else contextlib.nullcontext(), profile:
        for step in steps:
            with profile.step(step):
                if step == ends_at:
                    raise KeyError
                found.append(step)
    assert [one for one in found if one != 1 or not ends_at] == calls
