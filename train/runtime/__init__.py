"""The training loop, its state, checkpoints, hosts and monitoring."""
