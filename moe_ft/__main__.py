"""Entry of ``python -m moe_ft``."""

import sys

from moe_ft.cli import main

sys.exit(main())
