"""A request's way through the library: loading, settings, prompts, plans, batches and results."""
