"""Measures the broker: `penstock bench broker`. One file per workload; processes.py and worker.py are the harness."""
