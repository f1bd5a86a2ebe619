"""SchedulerService over real gRPC: plans, and how they follow machines and lengths."""
