"""DFlash block drafters, with or without a head on top."""
