"""The page of a run: an HTTP server that answers questions about run folders, and the same page as one file.

`static` is the page itself, `queries` what it asks, `files` reads run folders. Nothing here writes into a run folder
but the report.
"""
