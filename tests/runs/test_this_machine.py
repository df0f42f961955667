"""A CPU is known by what Linux says of its first core."""

from bert_packed.runs import this_machine


def test_a_cpu_is_known_by_its_own_words(tmp_path, monkeypatch):
    lines = "processor\t: 0\nmodel name\t: One CPU @ 2: GHz\nflags\t\t: fpu avx2 {}\n\nmodel name : two\n"
    for flag, expected in (("avx512f", True), ("avx512fp16", False)):
        this_machine._cpu.cache_clear()
        monkeypatch.setattr(
            this_machine, "open", lambda _, flag=flag: (tmp_path / flag).open(), raising=False
        )
        (tmp_path / flag).write_text(lines.format(flag))
        assert this_machine.cpu_name() == "One CPU @ 2: GHz"
        assert this_machine.has_wide_vectors() is expected
    this_machine._cpu.cache_clear()
    monkeypatch.setattr(this_machine, "open", lambda _: (tmp_path / "none").open(), raising=False)
    assert (this_machine.cpu_name(), this_machine.has_wide_vectors()) == ("unknown", False)
    this_machine._cpu.cache_clear()
