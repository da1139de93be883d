"""File formats that weights are read from, each presented as a mapping of names to tensors that are read in slices."""
