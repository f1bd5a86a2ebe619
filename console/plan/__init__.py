"""`penstock plan` and `penstock simulate`: what they compute from a problem file, as text and as pictures.

Planning itself is in `services.scheduler`, simulation in `simulator`.
"""
