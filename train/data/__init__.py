"""Training text: records, documents and packed examples."""
