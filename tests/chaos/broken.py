"""The program with a mistake in its recovery, to see that chaos notices (tests/breakages.py)."""

import pretrain_gpt_moe
from tests.breakages import apply_breakage

apply_breakage()
pretrain_gpt_moe.main()
