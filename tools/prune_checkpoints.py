"""Show or remove old checkpoints on storage: the same as `python -m moe_ft prune`.

python tools/prune_checkpoints.py PERSIST_DIR --keep 3 [--every 1000] [--days 2] [--remove]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe_ft.cli import main

if __name__ == "__main__":
    sys.exit(main(["prune", *sys.argv[1:]]))
