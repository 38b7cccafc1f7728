"""pretrain_gpt_moe.py whose ranks write digests of the shards that they have for dead ranks, at the end.

Faults in DYING hang in log lines: see pretrain_dying_between.py.
"""

import json
import os
from pathlib import Path
from typing import Any

from megatron.training import get_args, training

import pretrain_gpt_moe
from megatron.fault_tolerance.degraded.degradation import Degradation
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.state.digest import digest_state
from tests.distributed.scripts.pretrain_dying_between import die_or_call


def main() -> None:
    """Train, with the degradation of this rank and what was built noted."""
    found: list[Degradation] = []
    built: list[Any] = []

    def make(original: Any, degradation: Degradation, *args: Any) -> None:
        original(degradation, *args)
        found.append(degradation)

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        built[:] = args[2:5]
        return original(*args, **kwargs)

    with Patches() as patches:
        init = Degradation.__init__
        patches.set(Degradation, "__init__", lambda self, *args: make(init, self, *args))
        patches.wrap(training, "train_step", step)
        if "DYING" in os.environ:
            patches.wrap(training, "training_log", die_or_call)
        pretrain_gpt_moe.main()
    model, _, scheduler = built
    for rank, shard in found[0].deputies.shards.items():
        digest = digest_state(model, shard, scheduler, {})
        path = Path(get_args().moe_ft_event_log) / f"shard_{rank}.json"
        path.write_text(json.dumps([get_args().rank, digest.sha256]))


if __name__ == "__main__":
    main()
