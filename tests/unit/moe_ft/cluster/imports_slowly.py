"""A module whose import hangs while a file `slow` exists; `importing` has the process that has begun."""

import os
import time
from pathlib import Path

_folder = Path(os.environ["FOLDER"])
(_folder / "importing").write_text(str(os.getpid()))
while (_folder / "slow").exists():
    time.sleep(0.05)
