"""Settings of moe_ft: frozen dataclasses, from which the --moe-ft-* flags are generated."""
