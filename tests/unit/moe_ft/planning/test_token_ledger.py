"""Tokens of a stage's experts: adding up what the stages of a job have lost."""

import pytest

from moe_ft.planning.token_ledger import job_plt


def test_plt_of_a_job_is_the_mean_over_layers_of_all_stages() -> None:
    assert job_plt({"layer.0": (5, 5), "layer.1": (0, 2)}, 100) == (12, pytest.approx(0.06))


def test_plt_of_a_job_without_experts_is_zero() -> None:
    assert job_plt({}, 100) == (0, 0.0)
