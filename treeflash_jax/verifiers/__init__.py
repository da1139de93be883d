"""The language model that is served: layers, attention, caches, forward pass."""
