"""Object storage (s3://, gs://, file://) for models, data and checkpoints: addresses, transfers, a cache on the disk.

Knows files, sizes and digests; what they mean is for the services to say.
"""
