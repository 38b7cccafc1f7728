"""The part of fault tolerance that touches Megatron's training loop: flags, seams, data, CPU device."""
