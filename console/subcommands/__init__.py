"""Defines names, options and help of the commands that `console.cli` assembles.

Imports nothing but typer until a command runs, so that `penstock --help` answers at once. The other folders implement
the commands.
"""
