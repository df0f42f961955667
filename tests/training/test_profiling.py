"""The profile of some steps: files where TensorBoard looks for them, with the steps of the setting."""

import keras
import numpy as np
import pytest

from bert_packed.training import profiling
from bert_packed.training.backend import compiled
from bert_packed.training.profiling import Profile

pytestmark = pytest.mark.both_backends


def steps_in(folder):
    """Numbers of the steps that the traces below a folder hold."""
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


def noted(monkeypatch):
    calls = []
    monkeypatch.setattr(profiling, "_start", lambda folder: calls.append(f"start {folder}"))
    monkeypatch.setattr(profiling, "_end", lambda: calls.append("end"))
    return calls


def test_a_run_that_stops_in_between_leaves_its_trace(monkeypatch):
    calls = noted(monkeypatch)
    with pytest.raises(KeyError), Profile("x", range(2, 9)) as profile:
        for step in range(1, 9):
            with profile.step(step):
                if step == 4:
                    raise KeyError
    assert calls == ["start x", "end"]


def test_a_run_that_continues_in_between_traces_what_is_left(monkeypatch):
    calls = noted(monkeypatch)
    with Profile("x", range(2, 5)) as profile:
        for step in range(3, 9):
            with profile.step(step):
                calls.append(step)
    assert calls == ["start x", 3, 4, "end", 5, 6, 7, 8]


def test_without_steps_nothing_is_traced(monkeypatch):
    calls = noted(monkeypatch)
    with Profile() as profile, profile.step(1):
        pass
    assert calls == []
