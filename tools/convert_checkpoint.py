"""Convert a checkpoint: the same as `python -m moe_ft convert`, see docs/convert.md."""

import sys

from moe_ft.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
