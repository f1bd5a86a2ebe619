"""Translates OpenAI's formats: requests, errors, chat templates and tool calls.

Field by field, without sessions or the engine.
"""
