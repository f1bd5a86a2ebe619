"""Generators, scripted engines, faulty vLLM workers and OpenAI endpoints for tests."""
