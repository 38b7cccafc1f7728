"""Flags of a command line from settings."""

from moe_ft.convert.huggingface.flags import flags_of


def test_settings_are_written_as_megatron_reads_them() -> None:
    settings = {
        "--num-layers": 2,
        "--layernorm-epsilon": 1e-6,
        "--add-bias-linear": False,
        "--swiglu": True,
        "--qk-layernorm": False,
        "--mtp-num-layers": None,
        "--moe-layer-freq": [0, 1],
        "--spec": ["module", "name"],
    }
    first = "--num-layers 2 --norm-epsilon 1e-06 --disable-bias-linear --swiglu"
    assert flags_of(settings) == [
        *first.split(),
        "--moe-layer-freq",
        "[0,1]",
        "--spec",
        "module",
        "name",
    ]


def test_switch_that_is_on_by_default_needs_no_flag() -> None:
    assert flags_of({"--add-bias-linear": True}) == []
