"""What the broker costs: `penstock bench broker`. One file a workload; processes.py and worker.py are the harness."""
