"""Entry of ``python -m moe_ft``."""

import sys

from moe_ft.cluster import worker
from moe_ft.commands.run import is_given

# First, since every restart waits for it: the other commands import half a second.
if is_given("keep", sys.argv[1:]):
    worker.main(sys.argv[2:])

from moe_ft.cli import main  # noqa: E402

sys.exit(main())
