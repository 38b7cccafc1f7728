"""Training that notes which parameters its replays train and give gradients to."""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

import pretrain_gpt_moe
from moe_ft.state import freezing
from moe_ft.state.freezing import Freezing
from moe_ft.units import UnitId

# Treats single experts as one module, as Transformer Engine has them; that needs a GPU.
_AS_GROUPED = re.compile(r"(?P<module>.*\.experts)\.local_experts\.\d+\.")


def train_watched(folder: str, is_grouped: bool, flags: list[str]) -> None:
    """Train, and note the parameters of each replayed iteration. Runs on every rank.

    Args:
        folder: for the file that `replays_of` reads; the next start replaces it.
        is_grouped: whether the experts of a layer count as one module, as with --moe-grouped-gemm.
    """
    replays: list[list[dict[str, Any]]] = []
    frozen = Freezing.frozen

    @contextmanager
    def watched(self: Freezing, units: Collection[UnitId]) -> Iterator[None]:
        with frozen(self, units):
            yield
            replays.append([_describe(each, units) for each in self._parameters])
        path = Path(folder) / f"replays_{dist.get_rank()}.json"
        path.write_text(json.dumps(replays))

    Freezing.frozen = watched  # type: ignore[method-assign]
    if is_grouped:
        freezing._GROUPED = _AS_GROUPED
    pretrain_gpt_moe.main(flags)


def replays_of(folder: Path, rank: int) -> list[list[dict[str, Any]]]:
    """Return ``[replay][parameter]`` of the last start that replayed."""
    found: list[list[dict[str, Any]]] = json.loads((folder / f"replays_{rank}.json").read_text())
    return found


def _describe(local: Any, units: Collection[UnitId]) -> dict[str, Any]:
    return {
        "name": local.name,
        "kind": local.unit.kind.value,
        "layer": local.unit.layer_name,
        "is_to_come": local.unit in units,
        "is_trained": local.parameter.requires_grad,
        "has_gradient": bool(local.parameter.main_grad.any()),
    }
