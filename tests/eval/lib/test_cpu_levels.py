"""Levels of CPU instructions are chosen, restored and refused by name."""

from eval.lib.cpu_levels import at_level, current_level, levels_here, lowering, peers_note


def test_a_level_is_that_of_the_block_and_then_the_one_before(monkeypatch):
    monkeypatch.setenv("NANOVLM_CPU_LEVEL", "none")
    for level in levels_here():
        with at_level(level):
            assert current_level() == level
        assert current_level() == "none"
    monkeypatch.delenv("NANOVLM_CPU_LEVEL")
    with at_level("none"):
        assert current_level() == "none"
    assert current_level() == (levels_here() or ["none"])[-1]


def test_a_single_level_below_the_best_lowers_other_engines():
    assert lowering([current_level()]) == lowering(["none"]) == lowering(["avx2", "vnni"]) == {}
    assert peers_note(["none"]) == "other engines at their best"
    for level in levels_here()[:-1]:
        assert lowering([level])["NANOVLM_CPU_LEVEL"] == level and "ONEDNN_MAX_CPU_ISA" in lowering([level])
        assert f"oneDNN in OpenVINO held to {level}, " in peers_note([level])
