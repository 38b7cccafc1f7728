"""A stand-in for a CUDA device on the CPU, which runs queued operations as late as CUDA's rules allow."""
