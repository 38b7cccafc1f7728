"""The loop of examples/custom_loop.py, as tests run it."""

import importlib.util
import sys
from types import ModuleType

from megatron.core.distributed import DistributedDataParallelConfig

from tests.unit.source import ROOT

EXAMPLE = ROOT / "examples" / "custom_loop.py"


def load_example() -> ModuleType:
    """Return the module of the example, which is in no package."""
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


def run_with_overlap(words: list[str]) -> None:
    """Run the example with gradients reduced during backward and weights gathered during forward."""
    sys.argv = [str(EXAMPLE), *words]
    example = load_example()
    example.DDP = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    example.main()
