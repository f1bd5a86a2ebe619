"""The workloads of `penstock bench broker`, except the token stream, which other suites use too."""
