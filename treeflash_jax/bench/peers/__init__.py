"""Scripts with which other programs decode as systems of `bench run`; each runs in its own environment."""
