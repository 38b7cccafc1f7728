"""Defaults for the CPU are those of Megatron's own flags, and a flag or a script can still differ."""

import argparse

from megatron.core.transformer.enums import AttnBackend
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu.defaults import CPU_DEFAULTS, UNFUSED_DEFAULTS, set_cpu_defaults


def test_defaults_change_flags_that_megatron_has_and_leave_the_rest() -> None:
    def parse(*words: str, adapted: bool) -> dict[str, object]:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser = megatron_arguments.add_megatron_arguments(parser)
        if adapted:
            set_cpu_defaults(parser)
        args: argparse.Namespace = parser.parse_args(words)
        return vars(args)

    stock, adapted = parse(adapted=False), parse(adapted=True)
    assert stock.keys() == adapted.keys()
    changed = {name for name in stock if stock[name] != adapted[name]}
    assert changed == {*CPU_DEFAULTS, *UNFUSED_DEFAULTS}
    given = parse("--num-workers", "3", "--attention-backend", "flash", adapted=True)
    assert (given["num_workers"], given["attention_backend"]) == (3, AttnBackend.flash)
