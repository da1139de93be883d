"""Stages that train drafters."""
