"""Repairs of real jobs over the stand-in for NCCL: ranks are killed in every phase."""

from collections.abc import Mapping, Sequence

import pytest

from megatron.fault_tolerance.repair.rules import TRY_ON_GPUS
from tests.device.nccl import CONFLICT
from tests.jobs import DENSE, PP_EP, RepairedJob
from tests.references import Place

SCRIPT = "tests/device/nccl_program.py"


class LateJob(RepairedJob):
    """Job over late collectives, compared with one over gloo."""

    def repair(self, *faults: str, **options: Any) -> None:
        env = {TRY_ON_GPUS: "1", "MOE_FT_TEST": "1"}
        self.run(*faults, script=SCRIPT, env=env, **options)
        assert CONFLICT not in (self.folder / "log").read_text()
