"""The model: architectures, adapters, auxiliary models, precision."""
