"""Tests, by cost: unit, contract, integration, end to end."""
