"""The job of tiny_job.py in a script that protects itself: flags of moe_ft, `--`, its own words."""

import sys

import tiny_job

from megatron.fault_tolerance.bridge.launch import protected

if __name__ == "__main__":
    end = sys.argv.index("--")
    flags, sys.argv[1:] = sys.argv[1:end], sys.argv[end + 1 :]
    with protected(flags):
        tiny_job.main()
