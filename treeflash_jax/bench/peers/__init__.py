"""Other programs that decode the same model, for `bench.compare`: each runs in an environment of its own, as a script."""
