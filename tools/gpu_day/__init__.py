"""Days with a GPU: steps that show what no CPU can, within minutes. docs/gpu_day.md says how to run them."""
