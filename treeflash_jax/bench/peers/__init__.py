"""Scripts that let other programs decode as systems of `bench run`. Each script runs in a separate environment."""
