"""Parts of a pretraining program: flags, model, data, forward step."""
