"""Figures of the papers: fits give back what made the figures, and deviations are those that pages say."""

import math
from dataclasses import replace

import pytest

from benchmarks.papers import ettr, moevement, tables
from benchmarks.papers.ettr import Cell, cells, fit_model, fit_restart


def made_up(overhead: float, restart_s: float) -> list[Cell]:
    """Return the cells of a model with these, at five MTBFs, with other recoveries each."""
    own = [each for each in cells("table 3") if each.system == "MoEvement"][:5]
    return [
        replace(
            each,
            overhead_s=overhead * each.case.iteration_s,
            ettr=math.exp(-((each.recovery_s or 0.0) + restart_s) / each.mtbf_s) / (1 + overhead),
        )
        for each in own
    ]


def test_fits_give_back_restart_and_overhead_that_made_the_figures() -> None:
    found = made_up(overhead=0.04, restart_s=25.0)
    assert fit_restart(found) == pytest.approx(25.0)
    restart_s, overhead_s = fit_model(found)
    assert restart_s == pytest.approx(25.0)
    assert overhead_s == pytest.approx(0.04 * found[0].case.iteration_s)


def test_simulation_gives_what_the_fit_takes_for_granted() -> None:
    for each in made_up(overhead=0.04, restart_s=25.0):
        ours = ettr.with_recovery(each, 25.0, each.overhead_s)
        assert ours == pytest.approx(each.ettr, abs=0.002)


def test_failures_are_poisson_as_the_closed_form_of_the_work_that_they_undo_says() -> None:
    cell = next(each for each in cells("table 3") if each.interval == 113 and each.mtbf_s == 600)
    step_s = cell.case.iteration_s + (cell.overhead_s or 0.0)
    states = 113 * step_s / cell.mtbf_s
    expected = states / math.expm1(states) * cell.case.iteration_s / step_s
    assert ettr.from_formulas(cell) == pytest.approx(expected, abs=0.003)


def test_table_3_is_met_as_closely_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ettr, "TOLERANCE", 0.01)
    compared, fitted = ettr.compare("table 3")
    found = {str(row[0]): row[1:] for row in ettr.summary_rows(compared)}
    assert float(str(found["MoEvement"][1]).partition(",")[0]) < 0.006
    assert float(str(found["MoEvement"][2]).partition(",")[0]) < 0.005
    assert float(str(found["CheckFreq"][2]).partition(",")[0]) < 0.01
    assert len(compared) == 80
    # One restart for each system, and a restart and an overhead for each model but MoC-System's.
    assert len(fitted) == 4 + 3 * 4


def test_other_figures_are_those_that_calculation_gives() -> None:
    rows = [
        *moevement.moevement_rows(),
        *tables.moetion_rows(),
        *tables.lazarus_rows(),
    ]
    found = {(row[0], row[1]): row[2] for row in rows}
    assert found["Fig. 4", "selective, GB"] == "61.3"
    assert found["App. D", "alpha at S = 0.99"] == "0.000158"
    assert [row[2] for row in rows if "survivals" in str(row[1])] == ["5", "7"]
    assert moevement.count_right(moevement.windows()) == "6 of 9"
    speed, _, _, overheads = moevement.overhead_rows()
    assert speed == pytest.approx(15.1, abs=0.1)
    assert max(abs(float(str(row[4]))) for row in overheads) < 0.1


def test_spread_placement_of_lazarus_leaves_the_pairs_that_its_text_prints() -> None:
    printed = [(1, 2), (1, 3), (1, 4), (2, 4), (2, 5)]
    found = tables.surviving_pairs(tables.SPREAD)
    assert [(one + 1, other + 1) for one, other in found] == printed
