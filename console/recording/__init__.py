"""Records a run's trained trajectories: one row per sample, as JSONL or parquet, written and read as a stream."""
