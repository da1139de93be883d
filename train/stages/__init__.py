"""Stages that train drafters: `drafting.DraftingStage` is their protocol, `registry.STAGES` their list."""
