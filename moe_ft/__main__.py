"""Entry of ``python -m moe_ft``."""

import sys

from moe_ft.commands.run import is_given, keep

# First, since every start waits for it: the other commands import half a second.
if is_given("keep", sys.argv[1:]):
    keep(sys.argv[2:])

from moe_ft.cli import main  # noqa: E402

sys.exit(main())
