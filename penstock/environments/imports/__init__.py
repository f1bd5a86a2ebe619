"""Environments of other packages as environments of the SDK, each by a name that says where it is."""
