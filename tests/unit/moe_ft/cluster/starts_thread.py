"""A module that leaves a thread running."""

import threading
import time

threading.Thread(target=time.sleep, args=(1000,), name="left", daemon=True).start()
