"""What tests share, by subject; here what every suite uses: processes, servers, links, clocks, certificates.

No tests, and nothing that only one test file uses unless it runs as a process of its own.
"""
