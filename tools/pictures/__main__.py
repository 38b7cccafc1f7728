"""All pictures of the documentation: `python -m tools.pictures` writes them into docs/pictures."""

from collections.abc import Callable
from pathlib import Path

from tools.pictures import choices, diagrams, plans, plots, runs
from tools.pictures.svg import Drawing

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES: dict[str, Callable[[], Drawing]] = {
    "repair": runs.draw_repair,
    "iteration": runs.draw_iteration,
    "processes": diagrams.draw_processes,
    "ladder": diagrams.draw_ladder,
    "layers": diagrams.draw_layers,
    "expert_slots": diagrams.draw_expert_slots,
    "sparse_window": plans.draw_sparse_window,
    "strategies": choices.draw_strategies,
    "partial_versions": plans.draw_partial_versions,
    "elastic": plans.draw_elastic,
    "recovery_time": plots.plot_recovery_time,
    "stall": plots.plot_stall,
    "lossy_quality": plots.plot_lossy_quality,
    "local_recovery": plots.plot_local_recovery,
}


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().render())


if __name__ == "__main__":
    main()
