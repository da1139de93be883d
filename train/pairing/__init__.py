"""The stages of `train.pair`: their settings, and which of them a rerun redoes."""
