"""Training text: `records` reads sources, `documents` tokenises them, `packing` fills sequences of fixed length."""
