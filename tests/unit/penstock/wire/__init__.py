"""What is packed into messages comes out unchanged, and is bounded."""
