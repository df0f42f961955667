"""A CPU is known by what Linux says of its first core."""

from benchmarks import this_machine


def test_a_cpu_is_known_by_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: One CPU @ 2: GHz\n\nmodel name : two\n")
    for name, expected in (("cpuinfo", "One CPU @ 2: GHz"), ("none", "unknown")):
        this_machine._cpu.cache_clear()
        monkeypatch.setattr(
            this_machine, "open", lambda _, name=name: (tmp_path / name).open(), raising=False
        )
        assert this_machine.cpu_name() == expected
    this_machine._cpu.cache_clear()
