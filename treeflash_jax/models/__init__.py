"""The verifier: layers, attention, KV caches and the forward pass."""
