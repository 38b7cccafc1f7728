"""Model of examples/quickstart.sh, as changes of the demo model of the tests."""

# Without its batches and norms, for layouts that need smaller ones.
SIZES: dict[str, str | int | float | bool] = {
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "moe_ffn_hidden_size": 256,
    "num_experts": 8,
    "seq_length": 128,
    "max_position_embeddings": 128,
}
MODEL: dict[str, str | int | float | bool] = {
    **SIZES,
    "micro_batch_size": 4,
    "normalization": "RMSNorm",
}
