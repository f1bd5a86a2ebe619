"""The five services; each runs alone and none imports another."""
