"""Command line of the simulation: `python -m tests.simulation --help`."""

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets decides what happens
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

from tests.simulation.command import main

sys.exit(main(sys.argv[1:]))
