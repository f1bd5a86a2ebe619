"""Stubs generated from `protos/penstock/v1` by `make proto`; never edited by hand."""
