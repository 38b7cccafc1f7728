"""A module whose import hangs while a file `slow` exists; `importing` says that it has begun."""

import os
import time
from pathlib import Path

_folder = Path(os.environ["FOLDER"])
(_folder / "importing").touch()
while (_folder / "slow").exists():
    time.sleep(0.05)
