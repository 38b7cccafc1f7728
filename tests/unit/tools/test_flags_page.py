"""The tables of flags in docs/flags.md are those that the settings make."""

from moe_ft.config.fields import ConfigPart
from tools.flags_page import PAGE, page_with, tables


def test_page_of_flags_has_the_tables_of_the_settings() -> None:
    remedy = "write them again: python -m tools.flags_page"
    assert page_with(PAGE.read_text(), tables()) == PAGE.read_text(), remedy


def test_tables_begin_with_the_flags_that_most_jobs_give_and_show_flags_as_code() -> None:
    text = tables()
    assert text.startswith(
        "### Basic\n\n| flag | default | meaning |\n|---|---|---|\n| `--moe-ft-strategy "
    )
    assert "; needs `--moe-ft-window auto` |" in text
    assert "| SLURM_JOB_ID, or torchrun's `--rdzv-id` |" in text
    assert "([more](#data-and-tokenizers))" in text  # on this page
    assert not ConfigPart.PAGE
