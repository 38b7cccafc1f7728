"""The loop of examples/custom_loop.py, as tests run it."""

import importlib.util
import os
import signal
import sys
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig

from megatron.fault_tolerance.checkpointer import Checkpointer
from tests.settled import apply_settling
from tests.unit.source import ROOT

EXAMPLE = ROOT / "examples" / "custom_loop.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("custom_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(words: list[str]) -> None:
    """Run the example on this rank, as torchrun does."""
    sys.argv = [str(EXAMPLE), *words]
    load_example().main()


def run_up_to_the_end(words: list[str]) -> None:
    """Run the example with breakpoints; rank 1 dies when it has trained to the end, before it has said so."""
    begin, finish = Checkpointer.__init__, Checkpointer.finish

    def begin_with_breakpoints(self: Checkpointer, settings: Any, **given: Any) -> None:
        begin(self, {**settings, "breakpoints": True}, **given)

    def finish_or_die(self: Checkpointer) -> bool:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(self)

    Checkpointer.__init__ = begin_with_breakpoints  # type: ignore[method-assign]
    Checkpointer.finish = finish_or_die  # type: ignore[method-assign]
    run_example(words)


def run_with_overlap(words: list[str]) -> None:
    """Run the example with gradients reduced during backward and weights gathered during forward."""
    sys.argv = [str(EXAMPLE), *words]
    example = load_example()
    example.DDP = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    example.main()


if __name__ == "__main__":
    apply_settling()
    run_example(sys.argv[1:])
