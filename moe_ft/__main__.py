"""Entry of ``python -m moe_ft``."""

import sys

from moe_ft.commands.keep import keep_rank, keeps_rank

if keeps_rank(sys.argv[1:]):  # every restart waits for it: the other commands import half a second
    keep_rank(sys.argv[2:])

from moe_ft.cli import main  # noqa: E402

sys.exit(main())
