"""Typed asynchronous clients of the services: deadlines, back-off and reconnects are theirs.

One file per subject. No service code and no bulk transfer of weights (see `penstock.downloads`).
"""
