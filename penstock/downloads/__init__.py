"""How a receiver gets a content: download, broadcast, and the check of a file against its manifest.

Built on `clients`, `transfer` and `collective`, none of which imports it.
"""
