"""Files: the meaning of model families and file dialects; reading and writing of weights, configs and tokenizers."""
