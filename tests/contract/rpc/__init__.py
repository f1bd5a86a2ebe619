"""What every gRPC client and server shares: deadlines, errors, fail-over."""
