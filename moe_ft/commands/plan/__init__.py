"""The command `plan`: sizes and costs of a model that need not exist."""
