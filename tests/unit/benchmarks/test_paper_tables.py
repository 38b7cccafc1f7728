"""Figures of the papers: fits give back what made the figures, and deviations are those that pages say."""

import json
from dataclasses import replace

import pytest

from benchmarks import paper_ettr, paper_tables
from benchmarks.paper_ettr import Cell, cells, fit_model, fit_restart


def made_up(overhead: float, restart_s: float) -> list[Cell]:
    """Return the cells of a model with these, at five MTBFs, with other recoveries each."""
    own = [each for each in cells("table 3") if each.system == "MoEvement"][:5]
    return [
        replace(
            each,
            overhead_s=overhead * each.case.iteration_s,
            ettr=(1 - ((each.recovery_s or 0.0) + restart_s) / each.mtbf_s) / (1 + overhead),
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
        ours = paper_ettr.with_recovery(each, 25.0, each.overhead_s)
        assert ours == pytest.approx(each.ettr, abs=0.002)


def test_figures_of_table_3_are_met_as_closely_as_the_page_says() -> None:
    compared, fitted = paper_ettr.compare("table 3")
    found = {str(row[0]): row[1:] for row in paper_ettr.summary_rows(compared)}
    assert float(str(found["MoEvement"][1]).partition(",")[0]) < 0.006
    assert float(str(found["MoEvement"][2]).partition(",")[0]) < 0.005
    assert float(str(found["CheckFreq"][2]).partition(",")[0]) < 0.01
    assert len(compared) == 80
    # One restart for each system, and a restart and an overhead for each model but MoC-System's.
    assert len(fitted) == 4 + 3 * 4


def test_other_figures_are_those_that_calculation_gives() -> None:
    rows = [
        *paper_tables.moevement_rows(),
        *paper_tables.moetion_rows(),
        *paper_tables.lazarus_rows(),
    ]
    found = {(row[0], row[1]): row[2] for row in rows}
    assert found["Fig. 4", "selective, GB"] == "61.3"
    assert found["App. D", "alpha at S = 0.99"] == "0.000158"
    assert [row[2] for row in rows if "survivals" in str(row[1])] == ["5", "7"]
    assert paper_tables._count_right(paper_tables._windows()) == "6 of 9"
    speed, _, _, overheads = paper_tables.overhead_rows()
    assert speed == pytest.approx(15.1, abs=0.1)
    assert max(abs(float(str(row[4]))) for row in overheads) < 0.1


def test_every_row_of_the_data_has_its_cells() -> None:
    path = paper_ettr.__file__.replace(".py", ".json")
    with open(path) as file:
        tables = json.load(file)
    for table, mtbfs in paper_ettr.MTBF_S.items():
        assert len(cells(table)) == len(tables[table]) * len(mtbfs)


def test_spread_placement_of_lazarus_leaves_the_pairs_that_its_text_prints() -> None:
    printed = [(1, 2), (1, 3), (1, 4), (2, 4), (2, 5)]
    found = paper_tables.surviving_pairs(paper_tables.SPREAD)
    assert [(one + 1, other + 1) for one, other in found] == printed
