"""Names, options and help of the commands that `console.cli` is assembled from.

Imports nothing but typer until a command runs, so that `penstock --help` answers at once. What a command does is in
the other folders.
"""
