"""Running a pretraining script. Importing it ends the process if Megatron is too old for the rest."""

from megatron.fault_tolerance.seams.versions import check_oldest
from moe_ft.loop.refusing import refusing

with refusing():
    check_oldest()
