"""`penstock plan` and `penstock simulate` on small problems."""
