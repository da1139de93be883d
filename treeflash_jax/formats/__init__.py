"""Files: what model families and file dialects mean, and how weights, configs and tokenizers are read and written."""
