"""Certificates, roles, secrets and addresses."""
