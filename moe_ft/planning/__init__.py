"""Pure planning: numbers in, frozen plans out. No torch, no files, no clocks."""
