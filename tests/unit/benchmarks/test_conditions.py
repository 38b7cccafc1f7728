"""A benchmark says on what machine and with which versions it was taken."""

import os
import platform
import re

from benchmarks.conditions import conditions


def test_conditions_name_the_machine_the_day_what_is_measured_and_the_versions() -> None:
    text = re.escape(f"{os.cpu_count()} cores, one thread a rank, gloo, no GPU; load at the start ")
    text += r"\d+\.\d\. \d{4}-\d\d-\d\d\. Median of 5\. "
    text += re.escape(f"Python {platform.python_version()}, torch ")
    assert re.fullmatch(text + r"\d\S+, megatron-core \d\S+\.", conditions("Median of 5."))
