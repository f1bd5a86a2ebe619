"""What stands between two services: it cuts, slows, counts, damages or translates what they send."""
