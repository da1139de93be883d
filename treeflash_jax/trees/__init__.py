"""Draft trees, and the builders that choose their nodes."""
