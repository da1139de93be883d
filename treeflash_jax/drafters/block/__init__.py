"""DFlash block drafters with heads: `block_drafter.BlockDrafter`."""
